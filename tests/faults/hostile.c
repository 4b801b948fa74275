/*
 * What any user's program may do beside the daemon, for the fault tests.
 *
 *   hostile MODE [NUMBER [NUMBER]] [whatever is to be in its arguments]
 *
 *   crowd N M     N children that call once and stay; M of them go on calling
 *   flood N       N children, one after the other, that call once and end at once
 *   execs N       becomes itself N times, with a call each time
 *   renames N     N calls, with another name before each
 *   orphan        a child that goes on calling; the parent ends
 *   parent        a child that calls once and ends; the parent goes on calling
 *   vfork         a child that shares its parent's memory calls, then ends
 *   leader        the main thread ends, another goes on calling
 *   rate N        N calls a second
 *   exit          one thread is inside of a call when main() returns, at SIGUSR1
 *   exec          one thread is inside of a call when another becomes /bin/sleep, at SIGUSR1
 *   uffd          behind its argv is a page that nobody ever fills (userfaultfd(2)); goes on calling
 *   fuse DIR      its address space is locked for good by a page fault on a FUSE file in DIR
 *
 * It says "ready" when that is so, and stays until it is killed, unless it has nothing left to do.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef ALONE
static long nothing(long work_ms) { return work_ms; }
#else
long llama_process(long work_ms);
#endif

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

/* Not with puts(): its buffer takes memory, which may be locked up. */
static void ready(void)
{
	if (write(STDOUT_FILENO, "ready\n", 6) != 6)
		exit(1);
}

static void call_for_ever(void)
{
	for (;;) {
		llama_process(0);
		usleep(50000);
	}
}

static void *calling_thread(void *unused)
{
	(void)unused;
	call_for_ever();
	return NULL;
}

static void start(void *(*thread)(void *), void *argument)
{
	pthread_t started;

	if (pthread_create(&started, NULL, thread, argument))
		fail("pthread_create");
}

static void *long_call(void *unused)
{
	(void)unused;
	llama_process(600000);
	return NULL;
}

static void wake(int number)
{
	(void)number;
}

static void call_until_told(void)
{
	signal(SIGUSR1, wake);
	start(long_call, NULL);
	ready();
	pause();
}

static void crowd(long many, long calling)
{
	for (long i = 0; i < many; i++) {
		pid_t child = fork();

		if (child < 0)
			fail("fork");
		if (!child) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			llama_process(0);
			if (i < calling)
				call_for_ever();
			pause();
		}
	}
	ready();
	pause();
}

static void flood(long many)
{
	while (many-- > 0) {
		pid_t child = fork();

		if (child < 0)
			fail("fork");
		if (!child) {
			llama_process(0);
			_exit(0);
		}
		waitpid(child, NULL, 0);
	}
	ready();
}

static void rename_often(long calls)
{
	char name[40]; /* of which the kernel keeps 15 */

	while (calls-- > 0) {
		snprintf(name, sizeof(name), "%ld\n\033[2J) S 0", calls);
		prctl(PR_SET_NAME, name);
		llama_process(0);
	}
	ready();
	pause();
}

/* Behind the argument that is longest lies a page that stays missing: whoever reads it would wait, if he could. */
static void hide_arguments(char **arguments)
{
	char *longest = arguments[0];
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register missing = { .mode = UFFDIO_REGISTER_MODE_MISSING };
	int fd = syscall(SYS_userfaultfd, O_CLOEXEC);

	for (; *arguments; arguments++)
		if (strlen(*arguments) > strlen(longest))
			longest = *arguments;
	missing.range.start = ((uintptr_t)longest + 4095) & ~4095ul;
	missing.range.len = 4096;
	if (fd < 0 || ioctl(fd, UFFDIO_API, &api) || madvise((void *)(uintptr_t)missing.range.start, 4096, MADV_DONTNEED) ||
	    ioctl(fd, UFFDIO_REGISTER, &missing))
		fail("userfaultfd");
}

/* A FUSE file whose first page cannot be read the first time, and is waited for without end the second. */
static int fuse_device;

static void answer(struct fuse_in_header *asked, int error, void *data, size_t size)
{
	char message[512];
	struct fuse_out_header *header = (void *)message;

	header->len = sizeof(*header) + size;
	header->error = error;
	header->unique = asked->unique;
	memcpy(message + sizeof(*header), data, size);
	if (write(fuse_device, message, header->len) < 0 && errno != ENOENT)
		fail("write to /dev/fuse");
}

static void serve_file(void)
{
	static char buffer[1 << 20];
	struct fuse_in_header *asked = (void *)buffer;
	struct fuse_attr directory = { .ino = 1, .mode = 040755, .nlink = 1 };
	struct fuse_attr file = { .ino = 2, .mode = 0100755, .nlink = 1, .size = 4096 };
	struct fuse_init_out begun = { .major = 7, .minor = 31, .max_write = 4096 };
	struct fuse_entry_out entry = { .nodeid = 2, .entry_valid = 1000, .attr_valid = 1000, .attr = file };
	struct fuse_attr_out attributes = { .attr_valid = 1000 };
	struct fuse_open_out opened = { 0 };
	int reads = 0;

	for (;;) {
		if (read(fuse_device, buffer, sizeof(buffer)) < 0) {
			if (errno == EINTR || errno == ENOENT)
				continue;
			exit(0);
		}
		switch (asked->opcode) {
		case FUSE_INIT:
			answer(asked, 0, &begun, sizeof(begun));
			break;
		case FUSE_LOOKUP:
			answer(asked, 0, &entry, sizeof(entry));
			break;
		case FUSE_GETATTR:
			attributes.attr = asked->nodeid == 1 ? directory : file;
			answer(asked, 0, &attributes, sizeof(attributes));
			break;
		case FUSE_OPEN:
			answer(asked, 0, &opened, sizeof(opened));
			break;
		case FUSE_READ:
			if (++reads == 1) {
				answer(asked, -EIO, NULL, 0);
				break;
			}
			sleep(2);
			ready();
			break;
		case FUSE_FORGET:
		case FUSE_RELEASE:
			break;
		default:
			answer(asked, -ENOSYS, NULL, 0);
		}
	}
}

static void *touch(void *path)
{
	int fd = open(path, O_RDONLY);
	char *page = fd < 0 ? MAP_FAILED : mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);

	if (page == MAP_FAILED)
		fail(path);
	return (void *)(long)*(volatile char *)page; /* waits with the address space locked for reading */
}

static void *want_memory(void *unused)
{
	(void)unused;
	sleep(1);
	mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); /* and now nobody else gets in */
	return NULL;
}

static void lock_memory(const char *directory)
{
	char options[200];
	static char path[4096];

	fuse_device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	snprintf(options, sizeof(options), "fd=%d,rootmode=40000,user_id=0,group_id=0", fuse_device);
	snprintf(path, sizeof(path), "%s/page", directory);
	if (fuse_device < 0 || mount("fuse", directory, "fuse", 0, options))
		fail("mount");
	pid_t victim = fork();
	if (victim)
		serve_file();
	close(fuse_device);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	start(want_memory, NULL);
	start(touch, path);
	pause();
}

int main(int count, char **arguments)
{
	const char *mode = count > 1 ? arguments[1] : "";
	long first = count > 2 ? atol(arguments[2]) : 0, second = count > 3 ? atol(arguments[3]) : 0;
	char number[24];

	if (!strcmp(mode, "crowd"))
		crowd(first, second);
	else if (!strcmp(mode, "flood"))
		flood(first);
	else if (!strcmp(mode, "renames"))
		rename_often(first);
	else if (!strcmp(mode, "exit"))
		call_until_told();
	else if (!strcmp(mode, "exec")) {
		call_until_told();
		execl("/bin/sleep", "sleep", "600", NULL);
		fail("execl");
	}
	else if (!strcmp(mode, "execs")) {
		llama_process(0);
		if (first > 0) {
			snprintf(number, sizeof(number), "%ld", first - 1);
			arguments[2] = number;
			execv("/proc/self/exe", arguments);
			fail("execv");
		}
		ready();
		pause();
	} else if (!strcmp(mode, "orphan")) {
		if (fork())
			return 0;
		ready();
		call_for_ever();
	} else if (!strcmp(mode, "parent")) {
		pid_t child = fork();

		if (!child) {
			llama_process(0);
			_exit(0);
		}
		waitpid(child, NULL, 0);
		ready();
		call_for_ever();
	} else if (!strcmp(mode, "vfork")) {
		if (!vfork()) {
			llama_process(0);
			_exit(0);
		}
		ready();
		pause();
	} else if (!strcmp(mode, "leader")) {
		start(calling_thread, NULL);
		ready();
		syscall(SYS_exit, 0);
	} else if (!strcmp(mode, "rate")) {
		ready();
		for (;;) {
			llama_process(0);
			usleep(1000000 / first);
		}
	} else if (!strcmp(mode, "uffd")) {
		hide_arguments(arguments);
		ready();
		call_for_ever();
	} else if (!strcmp(mode, "fuse"))
		lock_memory(arguments[2]);
	else {
		fprintf(stderr, "what is '%s'?\n", mode);
		return 2;
	}
	return 0;
}
