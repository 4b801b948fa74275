// Runs pytest with the Python that fetch-python310.sh has fetched, in the repository, all of whose modules it compiles.
// usage: node python310.js FOLDER REPOSITORY [ARG...]

const [folder, repository, ...args] = process.argv.slice(2);
const { loadPyodide } = require(`${folder}/pyodide.js`);

const RUN = `
import glob, os, sys
sys.dont_write_bytecode = True
sys.path[:0] = ["/repository", "/site"]
os.chdir("/repository")
import pytest
assert sys.version_info[:2] == (3, 10)
for path in glob.glob("moe_gpu_stabilizer/*.py") + glob.glob("benchmarks/*.py"):
    compile(open(path).read(), path, "exec")
int(pytest.main(args))
`;

async function main() {
    const python = await loadPyodide();
    for (const [place, source] of [["/repository", repository], ["/site", `${folder}/site`]]) {
        python.FS.mkdir(place);
        python.FS.mount(python.FS.filesystems.NODEFS, { root: source }, place);
    }
    python.globals.set("args", python.toPy(args));
    process.exitCode = python.runPython(RUN);
}

main();
