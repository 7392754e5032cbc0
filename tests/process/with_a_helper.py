"""A child process that, while it loads, has started a program of its own, as a compiler would be.

`python -m tests.process.with_a_helper`; the helper's process id is its progress.
"""

import argparse
import subprocess

from runtime.process import Process, run


def main(process: Process, arguments: argparse.Namespace) -> None:
    with subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL) as helper:
        process.progress(str(helper.pid))
        process.loaded()


if __name__ == "__main__":
    run(lambda _: "worker-0", main, argparse.ArgumentParser())
