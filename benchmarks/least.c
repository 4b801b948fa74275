/*
 * The least that can be done: wait for the ring buffer of probe.c, write min_freq, and write it back when nothing more
 * has come for the hold.  No rule, no question whose call it was, nothing saved.
 *
 *   least RINGBUF_FD MIN_FREQ_FILE HOLD_MS
 *
 * The ring buffer is not read: its consumer's position is set to the producer's, so that the next record wakes again.
 */
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void write_file(const char *path, const char *text)
{
	int file = open(path, O_WRONLY | O_CLOEXEC);

	if (file < 0 || write(file, text, strlen(text)) < 0 || ftruncate(file, strlen(text)) < 0)
		exit(1);
	close(file);
}

int main(int count, char **arguments)
{
	long page = sysconf(_SC_PAGESIZE);

	if (count != 4)
		return 2;

	struct pollfd ring = { .fd = atoi(arguments[1]), .events = POLLIN };
	const char *path = arguments[2];
	int hold_ms = atoi(arguments[3]), raised = 0;
	unsigned long *consumer = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_SHARED, ring.fd, 0);
	unsigned long *producer = mmap(NULL, page, PROT_READ, MAP_SHARED, ring.fd, page);

	if (consumer == MAP_FAILED || producer == MAP_FAILED)
		return 1;
	for (;;) {
		if (poll(&ring, 1, raised ? hold_ms : -1) > 0) {
			__atomic_store_n(consumer, __atomic_load_n(producer, __ATOMIC_ACQUIRE), __ATOMIC_RELEASE);
			if (!raised)
				write_file(path, "1020000000\n");
			raised = 1;
		} else {
			write_file(path, "306000000\n");
			raised = 0;
		}
	}
}
