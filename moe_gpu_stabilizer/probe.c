/*
 * The BPF half of moe-gpu-stabilizer: notes which process calls into libllama
 * and ggml, counts how often its CPU and GPU take turns, and wakes the daemon
 * only when it has something to decide.
 *
 * It reads no register and no kernel structure, so the same bytecode runs on
 * every architecture and every kernel from 5.8 (the first with a BPF ring
 * buffer).  tools/compile-probe turns it into probe.json; run that after every
 * change here.
 *
 * Each map has one writer, so nothing is lost between the two sides: the
 * daemon writes "settings" and "verdicts", this program the others (the daemon
 * only deletes from them).  All but "settings" drop the entry that was used
 * least when they are full.  What is lost then is learned again: a process
 * without a verdict is judged at its next call, a graph whose thread has been
 * dropped is not counted.
 */
#include "turns.h"

enum { KIND_CALL = 1, KIND_EXEC = 2, KIND_TURNS = 3 };
enum { VERDICT_IGNORED = 1, VERDICT_COUNTS = 2 };

struct settings {
	/* A process that counts wakes the daemon at most once per interval. */
	u64 wake_interval_ns;
	/* The daemon's pid namespace; inode 0 where it is the initial one. */
	u64 pidns_dev;
	u64 pidns_ino;
	u32 min_turns;
	u32 unused;
};

/* What a process has done lately.  Times are CLOCK_MONOTONIC. */
struct activity {
	u64 last_call_ns;
	u64 last_wake_ns;
	u64 calls;
	u32 last_tid;
	u32 unused;
};

struct wake {
	u64 at_ns;
	u32 tgid;
	u32 tid;
	u32 kind;
	u32 verdict; /* 0: unknown, the daemon has to judge this process */
};

BPF_ARRAY(settings, struct settings, 1);
BPF_TABLE("lru_hash", u32, u32, verdicts, 4096);
BPF_TABLE("lru_hash", u32, struct activity, activity, 4096);
BPF_TABLE("lru_hash", u32, struct process_turns, behaviour, 4096);
BPF_TABLE("lru_hash", u32, struct thread_turns, threads, 4096); /* by thread id */
BPF_RINGBUF_OUTPUT(wakes, 16); /* pages: 2,048 records */

/*
 * The ids that the daemon's /proc uses.  bpf_get_current_pid_tgid() gives those
 * of the initial pid namespace, also for a process inside another one, which
 * is what a daemon in the initial namespace needs to see containers.  Returns
 * 0 for a process that the daemon's namespace does not show.
 */
static inline u64 current_ids(struct settings *set)
{
	struct bpf_pidns_info ns = {};

	if (!set->pidns_ino)
		return bpf_get_current_pid_tgid();
	if (bpf_get_ns_current_pid_tgid(set->pidns_dev, set->pidns_ino, &ns, sizeof(ns)))
		return 0;
	return (u64)ns.tgid << 32 | ns.pid;
}

/* True where the record was taken: a full ring buffer must not count as a wake-up. */
static inline bool wake_daemon(u64 now_ns, u64 ids, u32 kind, u32 verdict)
{
	struct wake *wake = wakes.ringbuf_reserve(sizeof(*wake));

	if (!wake)
		return false;
	wake->at_ns = now_ns;
	wake->tgid = ids >> 32;
	wake->tid = (u32)ids;
	wake->kind = kind;
	wake->verdict = verdict;
	wakes.ringbuf_submit(wake, 0);
	return true;
}

static inline u32 verdict_on(u32 tgid)
{
	u32 *known = verdicts.lookup(&tgid);

	return known ? *known : 0;
}

/* A process that is not ignored was active: note it, and wake the daemon now and then. */
static inline void note_activity(struct settings *set, u64 now_ns, u64 ids, u32 verdict)
{
	u32 tgid = ids >> 32;
	struct activity *act = activity.lookup(&tgid);
	if (!act) {
		struct activity fresh = {};

		/* Fails harmlessly where another thread was faster. */
		activity.insert(&tgid, &fresh);
		act = activity.lookup(&tgid);
		if (!act)
			return;
	}

	act->last_call_ns = now_ns;
	act->last_tid = (u32)ids;
	__sync_fetch_and_add(&act->calls, 1);

	if (act->last_wake_ns && now_ns - act->last_wake_ns < set->wake_interval_ns)
		return;
	if (wake_daemon(now_ns, ids, KIND_CALL, verdict))
		act->last_wake_ns = now_ns;
}

/* Once for each change, however many graphs there are. */
static inline void tell_of_change(struct process_turns *process, u64 now_ns, u64 ids)
{
	u32 told = process->told;

	if (process->turning == told)
		return;
	/* First, so that two threads hardly ever tell the same. */
	process->told = !told;
	if (!wake_daemon(now_ns, ids, KIND_TURNS, 0))
		process->told = told;
}

/* uprobe on the entry of llama_decode, llama_process and llama_synchronize */
int on_call(void *ctx)
{
	int zero = 0;
	struct settings *set = settings.lookup(&zero);

	if (!set)
		return 0;

	u64 ids = current_ids(set);
	u32 tid = (u32)ids;
	if (!(ids >> 32))
		return 0;

	/*
	 * Whatever this thread computed is over.  What it computes on the CPU
	 * from here on, outside of a scheduled graph, is no section of one.
	 */
	struct thread_turns *thread = threads.lookup(&tid);
	if (thread)
		thread->in_graph = 0;

	u32 verdict = verdict_on(ids >> 32);
	if (verdict != VERDICT_IGNORED) /* reading the clock costs as much as a look-up */
		note_activity(set, bpf_ktime_get_ns(), ids, verdict);
	return 0;
}

/* uprobe on the entry of ggml_backend_sched_graph_compute_async */
int on_graph(void *ctx)
{
	int zero = 0;
	struct settings *set = settings.lookup(&zero);

	if (!set)
		return 0;

	u64 ids = current_ids(set);
	u32 tgid = ids >> 32, tid = (u32)ids;
	if (!tgid)
		return 0;

	struct thread_turns *thread = threads.lookup(&tid);
	if (!thread || thread->tgid != tgid) {
		/* A new thread, or one that has got the id of a dead one. */
		struct thread_turns fresh = { .tgid = tgid };

		threads.update(&tid, &fresh);
		thread = threads.lookup(&tid);
		if (!thread)
			return 0;
	}
	struct process_turns *process = behaviour.lookup(&tgid);
	if (!process) {
		struct process_turns fresh = {};

		behaviour.insert(&tgid, &fresh);
		process = behaviour.lookup(&tgid);
		if (!process)
			return 0;
	}

	u64 now_ns = bpf_ktime_get_ns();
	graph_begins(thread, process, set->min_turns, now_ns);
	tell_of_change(process, now_ns, ids);

	u32 verdict = verdict_on(tgid);
	if (verdict != VERDICT_IGNORED)
		note_activity(set, now_ns, ids, verdict);
	return 0;
}

/* uprobe on the entry of ggml_graph_compute: a section of a graph, or a computation on the CPU alone */
int on_section(void *ctx)
{
	int zero = 0;
	struct settings *set = settings.lookup(&zero);

	if (!set)
		return 0;

	u64 ids = current_ids(set);
	u32 tgid = ids >> 32, tid = (u32)ids;
	struct thread_turns *thread = threads.lookup(&tid);
	if (!thread || thread->tgid != tgid || !thread->in_graph)
		return 0;

	/*
	 * When a section began is asked only of a process that counts, and of
	 * the section with which it may begin to.
	 */
	u32 verdict = verdict_on(tgid);
	bool ignored = verdict == VERDICT_IGNORED;
	u64 now_ns = ignored && thread->sections != set->min_turns ? 0 : bpf_ktime_get_ns();

	if (section_begins(thread, set->min_turns, now_ns)) {
		struct process_turns *process = behaviour.lookup(&tgid);

		if (process) {
			graph_turns(thread, process, now_ns);
			tell_of_change(process, now_ns, ids);
		}
	}
	/* A heartbeat: one graph of a long prompt takes many seconds. */
	if (!ignored)
		note_activity(set, now_ns, ids, verdict);
	return 0;
}

/*
 * raw tracepoint sched_process_exec: the process is another program now, so
 * what was said of it no longer holds.  The next call makes it unknown again.
 */
int on_exec(void *ctx)
{
	int zero = 0;
	struct settings *set = settings.lookup(&zero);

	if (!set)
		return 0;

	u64 ids = current_ids(set);
	u32 tgid = ids >> 32;
	u32 *known = verdicts.lookup(&tgid);
	if (!known && !activity.lookup(&tgid) && !behaviour.lookup(&tgid))
		return 0;

	u32 verdict = known ? *known : 0;
	verdicts.delete(&tgid);
	activity.delete(&tgid);
	behaviour.delete(&tgid);
	threads.delete(&tgid); /* the main thread; the others are gone */
	wake_daemon(bpf_ktime_get_ns(), ids, KIND_EXEC, verdict);
	return 0;
}
