"""Builds the kernels that the tests use, all at once, before tests need the cores themselves.

`python -m tests.kernels`; what was built before is kept.
"""

from concurrent.futures import ThreadPoolExecutor

from worker_proc.native import build


def main() -> None:
    # A build ends with one long source on one core: a second one fills the others meanwhile.
    with ThreadPoolExecutor(2) as pool:
        try:
            for library in pool.map(build.library, build.runnable()):
                print(library)
        except build.NoKernels as e:
            print(f"no kernels: {e}")


if __name__ == "__main__":
    main()
