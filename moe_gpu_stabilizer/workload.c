/*
 * A stand-in for llama.cpp, for --demo and the tests: it exports the functions
 * that are probed, and calls them when told to on standard input.
 *
 *   cc -shared -fPIC -DPART_LIBRARY -o libllama.so workload.c
 *   cc -DPART_PROGRAM -o workload workload.c libllama.so
 *   cc -DPART_LIBRARY -DPART_PROGRAM -o static-workload workload.c
 *
 * Commands, one per line; each is answered with "done" when it is over:
 *   call N           N calls of llama_process, one after the other
 *   decode N         the same of llama_decode
 *   synchronize N    the same of llama_synchronize
 *   busy MS          one call of llama_process that computes for MS milliseconds
 *   sleep MS         one call of llama_process that sleeps for MS milliseconds
 *   threads T N      T threads at once, each with N calls of llama_process
 *   exec PROGRAM...  become another program
 *   pid              answered with the process id instead
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

long llama_decode(long work_ms);
long llama_process(long work_ms);
long llama_synchronize(long work_ms);

#ifdef PART_LIBRARY
static double now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

/* Computes for a positive time, sleeps for a negative one. */
static long work(long ms)
{
	volatile long sum = 0;
	double end = now_ms() + ms;

	if (ms < 0)
		usleep(-ms * 1000);
	else if (ms > 0)
		while (now_ms() < end)
			sum++;
	return sum;
}

/* Kept apart and of different content, so that no compiler merges them. */
__attribute__((noinline)) long llama_decode(long ms) { return work(ms) + 1; }
__attribute__((noinline)) long llama_process(long ms) { return work(ms) + 2; }
__attribute__((noinline)) long llama_synchronize(long ms) { return work(ms) + 3; }
#endif

#ifdef PART_PROGRAM
static void *call_many(void *calls)
{
	for (long i = 0; i < (long)calls; i++)
		llama_process(0);
	return NULL;
}

static void call_in_threads(int threads, long calls)
{
	pthread_t *started = calloc(threads, sizeof(*started));

	for (int i = 0; i < threads; i++)
		pthread_create(&started[i], NULL, call_many, (void *)calls);
	for (int i = 0; i < threads; i++)
		pthread_join(started[i], NULL);
	free(started);
}

static void become(char *line)
{
	char *arguments[64] = { 0 };
	int count = 0;

	for (char *word = strtok(line, " "); word && count < 63; word = strtok(NULL, " "))
		arguments[count++] = word;
	execv(arguments[0], arguments);
	perror(arguments[0]);
	exit(1);
}

int main(void)
{
	char line[4096];
	long number, calls;
	int threads;

	while (fgets(line, sizeof(line), stdin)) {
		line[strcspn(line, "\n")] = 0;
		if (sscanf(line, "call %ld", &number) == 1)
			call_many((void *)number);
		else if (sscanf(line, "decode %ld", &number) == 1)
			while (number-- > 0)
				llama_decode(0);
		else if (sscanf(line, "synchronize %ld", &number) == 1)
			while (number-- > 0)
				llama_synchronize(0);
		else if (sscanf(line, "busy %ld", &number) == 1)
			llama_process(number);
		else if (sscanf(line, "sleep %ld", &number) == 1)
			llama_process(-number);
		else if (sscanf(line, "threads %d %ld", &threads, &calls) == 2)
			call_in_threads(threads, calls);
		else if (!strncmp(line, "exec ", 5))
			become(line + 5);
		else if (!strcmp(line, "pid")) {
			printf("%d\n", getpid());
			fflush(stdout);
			continue;
		} else {
			fprintf(stderr, "what is '%s'?\n", line);
			return 2;
		}
		puts("done");
		fflush(stdout);
	}
	return 0;
}
#endif
