# shellcheck shell=bash
# What the tests fetch or build is kept outside the tree, where a finished thing appears in one step.

cache=${MOE_GPU_STABILIZER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/moe-gpu-stabilizer}

die() {
    echo "${0##*/}: $1" >&2
    exit 1
}

# usage: cached NAME BUILD      calls "BUILD DIRECTORY" where NAME is not in the cache yet; prints its path
# BUILD runs in a directory of its own; $home is where DIRECTORY will be.  With ONLY_IF_CACHED=1 in the environment it fails
# instead.
cached() {
    local work
    home=$cache/$1
    mkdir -p "$cache"
    # Two test runs may want it at once: one builds, the other waits for it.
    exec 9>"$home.lock"
    flock 9
    if [ ! -d "$home" ]; then
        [ -z "${ONLY_IF_CACHED:-}" ] || exit 1
        work=$(mktemp -d "$cache/building.XXXXXX")
        # shellcheck disable=SC2064 # this very directory
        trap "rm -rf '$work'" EXIT
        chmod 755 "$work"
        mkdir "$work/new"
        # A shell of its own: errexit is off in what stands before "||".
        (trap - EXIT && cd "$work" && "$2" "$work/new") >"$home.log" 2>&1 9>&- &
        wait $! || {
            tail -n 30 "$home.log" >&2
            die "that did not work; the whole log: $home.log"
        }
        mv "$work/new" "$home"
    fi
    echo "$home"
}

# usage: key FILE_OR_WORD...      what decides the result
key() {
    local one
    for one in "$@"; do
        if [ -f "$one" ]; then cat "$one"; else echo "$one"; fi
    done | sha256sum | cut -c1-12
}
