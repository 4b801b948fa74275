/*
 * A stand-in for llama.cpp, for --demo and the tests: it exports the functions
 * that are probed, and calls them when told to on standard input.
 *
 *   cc -shared -fPIC -DPART_LIBRARY -o libllama.so workload.c
 *   cc -DPART_PROGRAM -o workload workload.c -Wl,--no-as-needed libllama.so
 *   cc -DPART_LIBRARY -DPART_PROGRAM -o static-workload workload.c
 *
 * and of ggml, where it is there (with PART_GGML_CPU first, then PART_GGML_BASE):
 *
 *   cc -shared -fPIC -DPART_GGML_CPU -o libggml-cpu.so workload.c
 *   cc -shared -fPIC -DPART_GGML_BASE -o libggml-base.so workload.c libggml-cpu.so
 *
 * Commands, one per line; each is answered with "done" when it is over:
 *   call N           N calls of llama_process, one after the other
 *   decode N         the same of llama_decode
 *   synchronize N    the same of llama_synchronize
 *   busy MS          one call of llama_process that computes for MS milliseconds
 *   sleep MS         one call of llama_process that sleeps for MS milliseconds
 *   threads T N      T threads at once, each with N calls of llama_process
 *   graphs N S       N scheduled graphs, each with S sections on the CPU
 *   tokens N S       N calls of llama_process, each with such a graph in it
 *   rounds N P S     N times: P graphs with one section, then one with S, as with a draft model
 *   slow S MS        one graph whose S sections take MS milliseconds each, asleep where MS is negative
 *   alone N          N sections outside of any graph
 *   both N S         N graphs with one section, and as many with S in another thread, by turns
 *   compute MS       computes for MS milliseconds, in no call
 *   exec PROGRAM...  become another program
 *   pid              answered with the process id instead
 *   stamp            one call of llama_process, answered with when it was made, in ns of CLOCK_MONOTONIC
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if defined(PART_PROGRAM) && !defined(PART_LIBRARY)
#pragma weak llama_decode /* the program does without a library whose commands it is not given */
#pragma weak llama_process
#pragma weak llama_synchronize
#endif
#if defined(PART_PROGRAM) && !defined(PART_GGML_CPU)
#pragma weak ggml_graph_compute
#pragma weak ggml_backend_sched_graph_compute_async
#endif

long llama_decode(long work_ms);
long llama_process(long work_ms);
long llama_synchronize(long work_ms);
long ggml_graph_compute(long work_ms);
long ggml_backend_sched_graph_compute_async(long sections, long work_ms);

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

#ifdef PART_LIBRARY
/* Kept apart and of different content, so that no compiler merges them. */
__attribute__((noinline)) long llama_decode(long ms) { return work(ms) + 1; }
__attribute__((noinline)) long llama_process(long ms) { return work(ms) + 2; }
__attribute__((noinline)) long llama_synchronize(long ms) { return work(ms) + 3; }
#endif

#ifdef PART_GGML_CPU
__attribute__((noinline)) long ggml_graph_compute(long ms) { return work(ms) + 4; }
#endif

#ifdef PART_GGML_BASE
__attribute__((noinline)) long ggml_backend_sched_graph_compute_async(long sections, long ms)
{
	long sum = 5;

	while (sections-- > 0)
		sum += ggml_graph_compute(ms);
	return sum;
}
#endif

#ifdef PART_PROGRAM
static void compute_graphs(long graphs, long sections)
{
	while (graphs-- > 0)
		ggml_backend_sched_graph_compute_async(sections, 0);
}

/* Two models in one process, neither ahead of the other. */
static pthread_barrier_t both_done;

static void *compute_other_model(void *sections_and_graphs)
{
	long sections = ((long *)sections_and_graphs)[0], graphs = ((long *)sections_and_graphs)[1];

	while (graphs-- > 0) {
		compute_graphs(1, sections);
		pthread_barrier_wait(&both_done);
	}
	return NULL;
}

static void compute_two_models(long graphs, long sections)
{
	long other[] = { sections, graphs };
	pthread_t thread;

	pthread_barrier_init(&both_done, NULL, 2);
	pthread_create(&thread, NULL, compute_other_model, other);
	while (graphs-- > 0) {
		compute_graphs(1, 1);
		pthread_barrier_wait(&both_done);
	}
	pthread_join(thread, NULL);
	pthread_barrier_destroy(&both_done);
}

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
	long number, calls, sections;
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
		else if (sscanf(line, "graphs %ld %ld", &number, &sections) == 2)
			compute_graphs(number, sections);
		else if (sscanf(line, "tokens %ld %ld", &number, &sections) == 2)
			while (number-- > 0) {
				llama_process(0);
				compute_graphs(1, sections);
			}
		else if (sscanf(line, "rounds %ld %ld %ld", &number, &calls, &sections) == 3)
			while (number-- > 0) {
				compute_graphs(calls, 1);
				compute_graphs(1, sections);
			}
		else if (sscanf(line, "slow %ld %ld", &sections, &number) == 2)
			ggml_backend_sched_graph_compute_async(sections, number);
		else if (sscanf(line, "alone %ld", &number) == 1)
			while (number-- > 0)
				ggml_graph_compute(0);
		else if (sscanf(line, "both %ld %ld", &number, &sections) == 2)
			compute_two_models(number, sections);
		else if (sscanf(line, "compute %ld", &number) == 1)
			work(number);
		else if (!strncmp(line, "exec ", 5))
			become(line + 5);
		else if (!strcmp(line, "stamp")) {
			struct timespec now;

			clock_gettime(CLOCK_MONOTONIC, &now);
			llama_process(0);
			printf("%lld\n", now.tv_sec * 1000000000LL + now.tv_nsec);
			fflush(stdout);
			continue;
		} else if (!strcmp(line, "pid")) {
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
