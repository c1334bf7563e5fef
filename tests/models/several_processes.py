"""Work in several processes at once: forks of one that has imported torch, which takes seconds of processor time."""

import multiprocessing
import socket

import torch.multiprocessing


def in_processes(work, *arguments, count=2):
    """Call `work(rank, *arguments, port)` in each; the port is free for them to meet at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.get_context("forkserver").set_forkserver_preload(["fairhead.bench.cell"])  # as for grids
    torch.multiprocessing.start_processes(work, (*arguments, port), nprocs=count, start_method="forkserver")


def as_launched(rank, count, port):
    """The environment that torchrun and `accelerate launch` give a process."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in {**place, "OMP_NUM_THREADS": 1}.items()}
