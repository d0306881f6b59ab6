"""What a request to the store costs, of many processes that ask at the same time.

Method: `--clients` processes of this machine send requests to one TCPStore, each process `REQUESTS`
of each kind that a rank sends when a run starts, ends or fails. Figures are milliseconds of a
request, the median of the processes. Batches after the first ones send none (`ranks.py`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import TCPStore

REQUESTS = 50


def _ask(port: int, number: int, clients: int, results: Any) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False)
    everyone = [f"told/{other}" for other in range(clients)]
    kinds: dict[str, Callable[[], Any]] = {
        "set": lambda: store.set(everyone[number], "x" * 100),
        "add": lambda: store.add("count", 1),
        "check": lambda: store.check(["missing"]),
        "multi_get": lambda: store.multi_get(everyone),
    }
    taken = {}
    for kind, ask in kinds.items():
        if store.add(f"at/{kind}", 1) == clients:
            store.set(f"all at {kind}", "")
        store.wait([f"all at {kind}"])
        begun = time.perf_counter()
        for _ in range(REQUESTS):
            ask()
        taken[kind] = (time.perf_counter() - begun) / REQUESTS * 1e3
    results.put(taken)


def store_under(clients: int) -> dict[str, float]:
    """Returns the milliseconds of each kind of request while `clients` processes send them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    server, results = TCPStore("127.0.0.1", 0, is_master=True), context.Queue()
    processes = [
        context.Process(target=_ask, args=(server.port, number, clients, results))
        for number in range(clients)
    ]
    for process in processes:
        process.start()
    taken = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return {f"ms_{kind}": statistics.median(t[kind] for t in taken) for kind in taken[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8, 64])
    for clients in parser.parse_args().clients:
        found = store_under(clients)
        import shapes  # here, or every client would import Composer

        shapes.emit("store", {"clients": clients, **found})


if __name__ == "__main__":
    main()
