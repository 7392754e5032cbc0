"""`python -m worker_proc`: the worker's shell. One plan in, one result out, in order."""

import argparse
import time
from collections.abc import Callable

from runtime.errors import ConfigError
from runtime.messages import StepPlan, StepResult
from runtime.process import Process, run
from worker_proc.answer import Answer
from worker_proc.exchange import Exchange
from worker_proc.simulated import SimulatedEngine, Simulation

Execute = Callable[[StepPlan], Answer]
"""What carries a plan out."""

SIMULATED_PAGES = 1 << 16
SIMULATED_CONTEXT = 1 << 15


def serve(process: Process, execute: Execute) -> None:
    """Execute plans in the order in which they come, until the supervisor ends the process."""
    with _exchange(process) as exchange:
        while True:
            if exchange.wait():
                process.check_control()
            while (plan := exchange.take()) is not None:
                started_s = time.monotonic()
                answer = execute(plan)
                ended_s = time.monotonic()
                exchange.give(
                    StepResult(
                        step=plan.step,
                        tokens=answer.tokens,
                        logprobs=answer.logprobs,
                        prompt_logprobs=answer.prompt_logprobs,
                        started_s=started_s,
                        ended_s=ended_s,
                    )
                )


def _exchange(process: Process) -> Exchange:
    """This rank's wires. Every rank knows the same tokens; the scheduler hears them once."""
    instance, name, transport = process.instance, process.name, process.transport
    return Exchange(
        lambda: transport.inbox(instance.wire(name), f"scheduler → {name}"),
        (lambda: transport.outbox(instance.wire("results"), f"{name} → scheduler"))
        if name == "worker-0"
        else None,
        process.control,
    )


def real_worker(process: Process) -> Execute:
    """Load the model, agree on the pool, and say that work may come."""
    from worker_proc.engine import Engine  # only here: the simulated worker starts without torch
    from worker_proc.threads import default_threads

    config = process.instance.config
    files = process.instance.model
    engine = Engine.load(
        files,
        dtype=config.model.dtype,
        load_format=config.model.load_format,
        quantization=config.model.quantization,
        threads=config.worker.threads,
        progress=lambda fraction: process.progress(f"loading {files.name}", fraction),
    )
    page_size = config.scheduler.page_size
    num_pages = config.worker.num_page_override
    if num_pages is None:
        num_pages = engine.capacity(config.worker.kv_memory_fraction, page_size)
    elif num_pages > (most := engine.capacity(1.0, page_size)):
        raise ConfigError(
            f"num_page_override is {num_pages}: the memory that is free holds {most} pages of"
            f" {page_size} tokens; choose fewer"
        )
    begin = process.loaded(
        num_pages, engine.config.max_position_embeddings, engine.config.vocab_size
    )
    engine.begin(begin.num_pages, page_size, config.scheduler.max_running_req, begin.max_seq_len)
    dtype = str(engine.dtype).removeprefix("torch.")
    num_threads = config.worker.threads or default_threads()
    process.ready(
        f"{files.name} from {files.path}, {dtype}, {engine.computation.name} kernels,"
        f" {num_threads} threads"
    )
    return engine.answer


def simulated_worker(process: Process, simulation: Simulation) -> Execute:
    """As `real_worker`, with no model behind it.

    A step sleeps where a model would compute, so it lasts up to 0.15 ms longer than asked, all of
    it counted as busy. Spinning to the exact end was tried: it keeps the exchange from its turn.
    """
    config = process.instance.config
    process.progress("loading nothing", 0.0)
    time.sleep(simulation.load_s)
    page_size = config.scheduler.page_size
    begin = process.loaded(
        config.worker.num_page_override or SIMULATED_PAGES,
        SIMULATED_CONTEXT,
        simulation.vocab_size,
    )
    engine = SimulatedEngine(
        simulation,
        num_pages=begin.num_pages,
        page_size=page_size,
        num_slots=config.scheduler.max_running_req,
        max_seq_len=begin.max_seq_len,
    )
    process.ready(f"simulated, {simulation.answers} answers, {simulation.step_s * 1e3:g} ms a step")

    def execute(plan: StepPlan) -> Answer:
        end_s = time.monotonic() + simulation.step_time(len(plan.out_loc))
        answer = engine.answer(plan)
        time.sleep(max(0.0, end_s - time.monotonic()))
        return answer

    return execute


def main(process: Process, arguments: argparse.Namespace) -> None:
    if arguments.simulated:
        simulation = Simulation(
            vocab_size=arguments.vocab_size,
            answers=arguments.answers,
            load_s=arguments.load_s,
            step_s=arguments.step_ms / 1e3,
            token_s=arguments.token_us / 1e6,
        )
        serve(process, simulated_worker(process, simulation))
    else:
        serve(process, real_worker(process))


def parser() -> argparse.ArgumentParser:
    """The command line beside what every process takes."""
    result = argparse.ArgumentParser(prog="python -m worker_proc")
    result.add_argument("--rank", type=int, default=0, help="this worker's tensor-parallel rank")
    result.add_argument("--simulated", action="store_true", help="no model: simulated answers")
    group = result.add_argument_group("with --simulated")
    group.add_argument("--answers", choices=("random", "echo", "attend"), default="random")
    group.add_argument("--vocab-size", type=int, default=32000)
    group.add_argument("--load-s", type=float, default=0.0, help="time until it is ready")
    group.add_argument("--step-ms", type=float, default=0.0, help="time of a step")
    group.add_argument("--token-us", type=float, default=0.0, help="more for each of its tokens")
    return result


if __name__ == "__main__":
    run(lambda arguments: f"worker-{arguments.rank}", main, parser())
