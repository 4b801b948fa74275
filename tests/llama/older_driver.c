/*
 * A program for an older libllama: it loads a model and has tokens decoded,
 * one after the other, when told to on standard input.
 *
 *   older_driver BACKENDS MODEL [ANYTHING...]      commands: the number of tokens, one per line
 *
 * What the parameters are does not matter here, and their layout differs from
 * version to version: they are handed on as they come, in structs that are
 * large enough for all.
 */
#include <stdio.h>
#include <stdlib.h>

struct params { char bytes[2048]; };
struct batch { char bytes[256]; };

void ggml_backend_load_all_from_path(const char *path);
struct params llama_model_default_params(void);
struct params llama_context_default_params(void);
void *llama_model_load_from_file(const char *path, struct params params);
void *llama_init_from_model(void *model, struct params params);
struct batch llama_batch_get_one(int *tokens, int count);
void llama_set_n_threads(void *context, int threads, int batch_threads);
int llama_decode(void *context, struct batch batch);
float *llama_get_logits(void *context);

int main(int argc, char **argv)
{
	char line[64];
	int token = 100;

	if (argc < 3)
		return 2;
	ggml_backend_load_all_from_path(argv[1]);
	void *model = llama_model_load_from_file(argv[2], llama_model_default_params());
	void *context = model ? llama_init_from_model(model, llama_context_default_params()) : NULL;
	if (!context)
		return 1;
	llama_set_n_threads(context, 1, 1); /* threads that wait for each other spin */
	puts("loaded");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		for (int count = atoi(line); count > 0; count--)
			if (llama_decode(context, llama_batch_get_one(&token, 1)) || !llama_get_logits(context))
				return 1;
		puts("done");
		fflush(stdout);
	}
	return 0;
}
