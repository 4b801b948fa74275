/*
 * Preloaded into ggml's RPC server: it then says that the machine has as much
 * memory as PRETENDED_MIB, which makes it a device that is too small for a
 * model.  ggml asks sysconf() for it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

long sysconf(int name)
{
	static long (*original)(int);

	if (!original)
		original = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
	if (name == _SC_PHYS_PAGES)
		return (atol(getenv("PRETENDED_MIB")) << 20) / original(_SC_PAGESIZE);
	return original(name);
}
