/*
 * When do CPU and GPU take turns?  The rule, pure: no BPF in it, so that the
 * tests can compile it and throw sequences at it.
 *
 * ggml runs one scheduled graph per micro-batch and inside it, on the same
 * thread, one CPU graph for each section that is computed on the CPU.  A model
 * that sits on the device has one section (the token's embedding is looked up
 * on the CPU), one that never uses the device has one as well.  Each further
 * section means that the graph has been to the GPU and come back: a turn.
 *
 * A graph with at least min_turns is called turning, any other plain.
 */

/*
 * A process counts with its second turning graph if less than this many plain
 * ones lie between the two: a draft model makes a few dozen for each graph of
 * its target.
 */
#define NEAR_GRAPHS 64

/*
 * It no longer counts after a stretch of more plain graphs than these.  A
 * backend may compute large batches without the CPU, so a long prompt is no
 * such stretch: this many micro-batches of 512 tokens are 262,144 tokens.  And
 * the stretch has a time, because another thread may run another model.
 */
#define STRETCH_GRAPHS 512
#define STRETCH_NS 10000000000ULL

/* What a thread computes now, and what it has computed. */
struct thread_turns {
	unsigned int tgid;
	unsigned int in_graph;    /* 0: between two graphs, sections are not counted */
	unsigned int sections;    /* on the CPU, of the graph in progress or the last one */
	unsigned int last_turns;  /* of the graph before, 0 where there was none */
	unsigned int turned;      /* a turning graph was among the last NEAR_GRAPHS */
	unsigned int plain_graphs; /* in a row */
	unsigned long long began_ns;        /* the graph */
	unsigned long long last_section_ns; /* began; 0 before the first, and where no time was taken */
	unsigned long long section_ns;      /* from one section to the next, on average, in the graph before */
};

/* What is said of the process.  The first four go to the daemon. */
struct process_turns {
	unsigned long long graphs;
	unsigned long long last_turning_ns;
	unsigned int turning;     /* it counts */
	unsigned int told;        /* what the daemon was last told */
	unsigned int turns;       /* of the last turning graph while one is near, else of the last graph */
	unsigned int unused;
};

static inline unsigned int turns_of(unsigned int sections)
{
	return sections ? sections - 1 : 0;
}

/* A scheduled graph begins, so the one before is complete. */
static inline void graph_begins(struct thread_turns *thread, struct process_turns *process, unsigned int min_turns,
				unsigned long long now_ns)
{
	if (thread->began_ns) {
		unsigned int turns = turns_of(thread->sections);

		thread->last_turns = turns;
		thread->section_ns =
			turns && thread->last_section_ns ? (thread->last_section_ns - thread->began_ns) / thread->sections : 0;
		if (turns >= min_turns) {
			process->turns = turns;
		} else {
			if (thread->plain_graphs <= STRETCH_GRAPHS)
				thread->plain_graphs++;
			if (thread->plain_graphs >= NEAR_GRAPHS)
				thread->turned = 0;
			if (process->turning && thread->plain_graphs > STRETCH_GRAPHS &&
			    now_ns > process->last_turning_ns + STRETCH_NS)
				process->turning = 0;
			if (!process->turning && !(thread->turned && process->last_turning_ns))
				process->turns = turns;
		}
	}
	__sync_fetch_and_add(&process->graphs, 1);
	thread->in_graph = 1;
	thread->sections = 0;
	thread->began_ns = now_ns;
	thread->last_section_ns = 0;
}

/*
 * A CPU section begins.  Returns nonzero where it makes its graph a turning one.  now_ns may be 0 for other sections: how
 * long they take is then not known.
 */
static inline int section_begins(struct thread_turns *thread, unsigned int min_turns, unsigned long long now_ns)
{
	thread->sections++;
	thread->last_section_ns = now_ns;
	return thread->sections == min_turns + 1;
}

/* The graph in progress has become a turning one: whether the process counts is known before it is complete. */
static inline void graph_turns(struct thread_turns *thread, struct process_turns *process, unsigned long long now_ns)
{
	if (thread->turned)
		process->turning = 1;
	thread->turned = 1;
	thread->plain_graphs = 0;
	process->last_turning_ns = now_ns;
}
