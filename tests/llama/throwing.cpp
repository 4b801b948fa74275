// Preloaded into a real llama-server: while the file named by $THROW_WHILE_EXISTS exists, llama.cpp's decoding
// throws, as it does when an allocation fails on a board with too little memory.
//
// libllama exports llama_context's members and calls them through its procedure linkage table, so the definitions
// here come first. llama_process() and llama_decode() do nothing but call them: the exception crosses their frames.

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>

struct llama_batch;
struct llama_batch_ext;

// Only the names matter: the members below get the very symbols of libllama's.
struct llama_context {
    int decode(const llama_batch & batch);
    int decode(const llama_batch_ext & batch);
};

static void throw_if_asked() {
    const char * trigger = std::getenv("THROW_WHILE_EXISTS");
    if (trigger && access(trigger, F_OK) == 0) {
        throw std::runtime_error("thrown by a test");
    }
}

template <typename Batch>
static int call_the_real_one(const char * symbol, llama_context * context, const Batch & batch) {
    // A member function takes `this` as its first argument in the ABI that g++ and clang++ follow on Linux.
    using Decode = int (*)(llama_context *, const Batch &);
    const auto real = reinterpret_cast<Decode>(dlsym(RTLD_NEXT, symbol));
    if (!real) {
        std::abort(); // this build of llama.cpp has no such function, so nothing can have called it
    }
    return real(context, batch);
}

int llama_context::decode(const llama_batch & batch) {
    throw_if_asked();
    return call_the_real_one("_ZN13llama_context6decodeERK11llama_batch", this, batch);
}

int llama_context::decode(const llama_batch_ext & batch) {
    throw_if_asked();
    return call_the_real_one("_ZN13llama_context6decodeERK15llama_batch_ext", this, batch);
}
