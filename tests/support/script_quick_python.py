"""Python for programs that need torch and hookline: a process that has imported both forks for each program.

`script_quick_python.py serve SOCKET` is that process. With `SOCKET -m module ...` or `SOCKET -c code ...`
instead, the script is a client: it has a program run there with its own streams, folder, environment, signals and exit
status, as `python` does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys


def run_program(path: str, arguments: list[str]) -> None:
    """Ask the server to run a program, pass signals on to it, and end as it ends."""
    passed_on = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # Until there is a program to pass them to.
    streams = [stream for stream in range(3) if is_open(stream)]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        asked = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ), "streams": streams}
        message = json.dumps(asked).encode()
        socket.send_fds(server, [len(message).to_bytes(4, "big")], streams)
        server.sendall(message)
        program = number_from(server)
        for number in passed_on:
            signal.signal(number, lambda number, frame: os.kill(program, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        status = number_from(server)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def number_from(server: socket.socket) -> int:
    """Return the next number that the server sends."""
    sent = server.recv(4, socket.MSG_WAITALL)
    return int.from_bytes(sent, "big") if len(sent) == 4 else sys.exit("the process that forks programs has died")


def is_open(stream: int) -> bool:
    try:
        os.fstat(stream)
    except OSError:
        return False
    return True


def serve(path: str) -> list[str]:
    """Start programs until stdin is closed. This returns only in a program: the arguments that it is run with."""
    import gc

    from hookline import capture  # noqa: F401 (imports torch and the engine)

    gc.freeze()  # Programs need not look through all of torch for garbage.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for the processes that attend to one client.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                return attend(client)
            client.close()
    os._exit(0)


def attend(client: socket.socket) -> list[str]:
    """Start a program and tell the client how it ends; kill it if the client dies. Return in the program only."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, streams, _, _ = socket.recv_fds(client, 4, 3)
    with client.makefile("rb") as message:
        asked = json.loads(message.read(int.from_bytes(length, "big")))
    program = os.fork()
    if program == 0:
        client.close()
        return become(asked, streams)
    for stream in streams:
        os.close(stream)
    client.sendall(program.to_bytes(4, "big"))
    ended = os.pidfd_open(program)
    if ended in select.select([ended, client], [], [])[0]:
        client.sendall(os.waitpid(program, 0)[1].to_bytes(4, "big"))
    else:
        os.kill(program, signal.SIGKILL)
    os._exit(0)


def become(asked: dict[str, object], streams: list[int]) -> list[str]:
    """Take the streams, folder and environment of the client, as Python does when it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = dict(zip(asked["streams"], streams, strict=True))
    for number in range(3):
        if number in given:
            os.dup2(given[number], number)
            os.close(given[number])
        else:
            os.close(number)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    encoding = os.environ.get("PYTHONIOENCODING") or "utf-8"
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        errors, buffering = ("backslashreplace", 1) if name == "stderr" else (None, -1)  # It shows each line at once.
        options = {"buffering": buffering, "encoding": encoding, "errors": errors, "closefd": False}
        stream = open(number, "w" if number else "r", **options) if number in given else None  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    return asked["arguments"]


def run(arguments: list[str]) -> None:
    """Run a module or some code as the main program."""
    import runpy
    import types

    kind, what, *rest = arguments
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [os.getcwd() if kind == "-m" else "", *paths]
    sys.argv = [kind, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(sys.modules["__main__"]))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        del sys.path[0]  # The folder of this file.
        run(serve(sys.argv[2]))
    else:
        run_program(sys.argv[1], sys.argv[2:])
