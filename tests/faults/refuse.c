/*
 * Preloaded into the daemon: write() to a file called min_freq fails with the
 * error number that the file named by REFUSE_WITH holds, while there is one.
 *
 *   cc -shared -fPIC -o refuse.so refuse.c
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int refusal(int fd)
{
	const char *control = getenv("REFUSE_WITH");
	char link[64], path[4096];
	int number = 0;
	ssize_t length;
	FILE *file;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	length = readlink(link, path, sizeof(path) - 1);
	if (length < 0 || !control)
		return 0;
	path[length] = 0;
	if (!strrchr(path, '/') || strcmp(strrchr(path, '/'), "/min_freq"))
		return 0;
	file = fopen(control, "r");
	if (!file)
		return 0;
	if (fscanf(file, "%d", &number) != 1)
		number = 0;
	fclose(file);
	return number;
}

ssize_t write(int fd, const void *data, size_t bytes)
{
	ssize_t (*next)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
	int number = refusal(fd);

	if (!number)
		return next(fd, data, bytes);
	errno = number;
	return -1;
}
