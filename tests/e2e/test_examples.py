"""The examples, and README's commands, as they stand."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from runtime.config import child_environment
from runtime.server import Server
from tests.fakes import ROOT, simulated_server

USUAL_URL = "http://127.0.0.1:8000"
TOLD = "curl() { command curl -sS -w '\n%{http_code}\n' \"$@\"; }\n"
"""Each answer with its status."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with simulated_server(http=True, http_port=0) as running:
        yield running


def run(*command: str) -> str:
    """What it prints; it must succeed and say nothing else."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=child_environment()
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def answers(script: str) -> list[tuple[int, str]]:
    """The (status, body) of every curl of a shell script."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    out = run("bash", "-c", TOLD + script)
    return [(int(m[2]), m[1]) for m in re.finditer(r"(.*?)\n(\d{3})\n", out, re.DOTALL)]


def refusals(found: list[tuple[int, str]]) -> list[tuple[str, str]]:
    """(param, code) of those that were refused; the others are checked."""
    refused = []
    for status, body in found:
        if status == 200 and body.startswith("data:"):
            assert body.endswith("data: [DONE]\n\n")
        elif status == 200:
            json.loads(body)
        else:
            assert status == 400
            error = json.loads(body)["error"]
            refused.append((error["param"], error["code"]))
    return refused


def test_readmes_curls_are_answered(server: Server) -> None:
    text = (ROOT / "README.md").read_text()
    blocks = [b for b in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "curl " in b]
    script = "\n".join(blocks).replace(USUAL_URL, str(server.http_url))
    found = answers(script)
    assert len(found) == script.count("curl ") > 5
    assert refusals(found) == [("response_format", "unsupported_value")]


def test_the_curl_examples_are_answered(server: Server) -> None:
    text = (ROOT / "examples" / "http.sh").read_text()
    assert f"URL=${{1:-{USUAL_URL}}}" in text
    found = answers(f"set -- {server.http_url}\n{text}")
    assert len(found) == len(re.findall(r"^curl ", text, re.MULTILINE))
    assert refusals(found) == [
        ("response_format", "unsupported_value"),
        ("max_tokens", "context_length_exceeded"),
    ]


@pytest.mark.parametrize("name", ["http_client", "client", "async_client", "ask"])
def test_the_python_examples_run(server: Server, name: str) -> None:
    where = {
        "http_client": (str(server.http_url),),
        "ask": ("--endpoint", server.endpoint, "What is the sun?"),
    }.get(name, ("--endpoint", server.endpoint))
    assert run(sys.executable, f"examples/{name}.py", *where)
