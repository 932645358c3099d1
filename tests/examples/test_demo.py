"""The demo against a stand-in server: it starts, asks, prints, and stops what it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from examples import demo


FAKE = Path(__file__).with_name("fake_server.py")
ROOT = FAKE.parents[2]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Run the stand-in server for the real one and no model; the commands that were asked for."""
    commands = []

    def command(model: Path, url: str) -> list[str]:
        commands.append(real(model, url))
        return [sys.executable, str(FAKE), url.rpartition(":")[2]]

    real = demo.server_command
    monkeypatch.setattr(demo, "ensure_model", lambda path: path)
    monkeypatch.setattr(demo, "server_command", command)
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    monkeypatch.setenv("DEMO_ONCE", "1")
    monkeypatch.setenv("COLUMNS", "100")
    return commands


def test_demo_prints_answers_side_by_side(
    fake: list[list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert demo.main() == 0
    shown = capfd.readouterr().out
    for prompt in demo.PROMPTS:
        assert f"> {prompt}" in shown
    assert "smollm2 on What is meditation? " in shown
    assert "| pirate on What is meditation? " in shown
    assert "41 of 47 decode steps held rows of the base and of 2 adapters at once." in shown
    assert max(map(len, shown.splitlines()[2:])) <= 100
    (command,) = fake
    assert command[1:3] == ["-m", "serving.server"]
    assert "pirate=" + os.path.relpath(ROOT / "examples/adapters/pirate") in command


@pytest.mark.parametrize("status", [2, 3])
def test_demo_passes_on_the_servers_failure(
    status: int,
    fake: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = f"import sys; print('no such model', file=sys.stderr); sys.exit({status})"
    monkeypatch.setattr(demo, "server_command", lambda *_: [sys.executable, "-c", script])
    assert demo.main() == status
    shown = capfd.readouterr().err.splitlines()
    assert shown == ["no such model", f"error: the server ended with exit status {status}"]


def test_a_server_that_never_answers_is_given_up_and_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"http://127.0.0.1:{demo.free_port(0)}"
    silent = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        pytest.raises(demo.DemoError, match="did not answer /health within 0.2 s"),
        demo.running_server(silent) as server,
    ):
        demo.wait_until_healthy(server, url, seconds=0.2)
    assert server.returncode == -signal.SIGTERM


def test_an_error_answer_is_shown(fake: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ADAPTERS", ("missing",))
    assert demo.main() == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_server_too(number: signal.Signals) -> None:
    script = textwrap.dedent(f"""
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has none
        from examples import demo
        demo.ensure_model = lambda path: path
        demo.PREFERRED_PORT = 0
        demo.free_port = lambda port=demo.free_port(0): port
        demo.server_command = lambda model, url: [
            sys.executable, {str(FAKE)!r}, url.rpartition(":")[2]]
        sys.exit(demo.main())
    """)
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "DEMO_ONCE": "0", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    with process.stdout:
        served = next(line for line in process.stdout if line.startswith("Serving"))
        url = served.split(" on ")[1].split("/v1")[0]
        assert demo.read(url + "/health")
        process.send_signal(number)
        assert process.wait(20) == (0 if number == signal.SIGINT else 128 + number)
    with pytest.raises(OSError):
        demo.read(url + "/health")


@pytest.mark.parametrize("listening", [True, False])
def test_free_port_passes_over_one_in_use(listening: bool) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        if listening:
            taken.listen()
        port = taken.getsockname()[1]
        assert demo.free_port(port) not in (0, port)


def test_counter_reads_prometheus_text() -> None:
    text = textwrap.dedent("""
        # TYPE a_total counter
        a_total{x="1",y="tr\\"ue, }"} 3.0
        a_total{x="2"} 4 1700000000
        a_total_more{x="1"} 100
        b 7
    """)
    assert demo.counter(text, "a_total") == 7
    assert demo.counter(text, "a_total", x="1") == 3
    assert demo.counter(text, "a_total", y='tr\\"ue, }') == 3
    assert demo.counter(text, "b") == 7
    assert demo.counter(text, "none") == 0


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_columns_fit_the_terminal(width: int) -> None:
    cells = ["word " * 30, "**In short:**\n\n- one two three four five six seven eight nine", ""]
    lines = demo.columns(["a", "b", "c"], cells, width).splitlines()
    assert max(map(len, lines)) <= max(width, 3 * 16 + 2 * 3)
    assert lines[0].split(" | ")[0].strip() == "a"
    if width <= 100:
        assert any("|   " in line for line in lines[4:])  # a wrapped bullet is indented
