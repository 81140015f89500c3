"""One start of one replica, from nothing to hot, and down again.

Weights verified → engine launched → warm-up prompts → known answer → the same through the gateway →
ready. The agent is the only writer of its state (``lifecycle.py``), answers on a Unix socket
(``api.py``), owns its engine (``engine_process.py``), and ends when the start ends; a restart is
another agent. What does not belong here: choosing replicas, routes, restarts (the control plane's).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from preheat.core.coldstart import Recorder
from preheat.core.errors import EngineError, EngineExited, PreheatError, ProofError, SourceError
from preheat.replica import answers, asking, warmup
from preheat.replica.engine_process import EngineProcess
from preheat.replica.events import EventLog
from preheat.replica.lifecycle import INITIAL, ROUTABLE, Event, State, next_state
from preheat.replica.plan import ReplicaPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from preheat.acceleration.weights.sealed import SealedWeights
    from preheat.core.localhttp import Response
    from preheat.replica.begun import Begun

# An engine is asked whether it is up each time its process says something, and at least so often.
POLL_S = 0.01
# An engine that breaks a connection is most likely ending; so long its end is waited for.
DYING_S = 1.0

WAITING_FOR = {
    State.LOADING: "the weights are being verified",
    State.WARM: "the weights are resident; the engine is not started",
    State.STARTING: "the engine is loading the model",
    State.HEATING: "the warm-up prompts are running",
    State.PROVING: "the known answer is being checked",
    State.READY: "",
    State.DRAINING: "it is draining",
}


def run(plan_file: str, begun: Begun, started_s: float) -> int:
    """The agent's life; returns its exit code: 0 stopped as ordered, 4 failed."""
    plan = msgspec.json.decode(Path(plan_file).read_bytes(), type=ReplicaPlan)
    recorder = Recorder()
    recorder.add("agent.imports", started_s, time.monotonic(), track="agent")
    return asyncio.run(_live(plan, begun, recorder))


async def _live(plan: ReplicaPlan, begun: Begun, recorder: Recorder) -> int:
    try:
        events = EventLog(Path(plan.events), replica=plan.replica, start_id=plan.start_id)
    except OSError as error:
        print(f"the agent of {plan.start_id} cannot write its events: {error}", file=sys.stderr)
        return EngineError.exit_code
    return await Agent(plan, begun, recorder, events).live()


class Agent:
    def __init__(
        self, plan: ReplicaPlan, begun: Begun, recorder: Recorder, events: EventLog
    ) -> None:
        self.plan = plan
        self.state = INITIAL
        self.reason = ""
        self.begun = begun
        self.events = events
        self.engine = EngineProcess(begun, plan.start_id)
        self._recorder = recorder
        self._refused = ""
        self._news = asyncio.Event()
        self._heat = asyncio.Event()
        self._drain = asyncio.Event()
        self._stop = asyncio.Event()
        if plan.hold_at == "hot":
            self._heat.set()

    # ── orders, from the API and signals ──

    def order_heat(self) -> None:
        self._heat.set()

    def order_drain(self) -> None:
        self._drain.set()

    def order_stop(self) -> None:
        self._stop.set()

    @property
    def ready(self) -> bool:
        return self.state is State.READY and not self.engine.ended.is_set()

    @property
    def routable(self) -> bool:
        """Whether the gateway may send anything to the engine."""
        return self.state in ROUTABLE and not self.engine.ended.is_set()

    def missing(self) -> str:
        """What stands between this start and ready, in words; empty when it is ready."""
        text = WAITING_FOR.get(self.state, f"{self.state}: {self.reason}")
        return f"{text}; {self._refused}" if self._refused and not self.ready else text

    # ── life ──

    async def live(self) -> int:
        from preheat.replica import api

        self._listen_to_the_kernel()
        server = None
        try:
            server = await api.serve(self)
            self.events.add("spawned", self.state)
            await self._up_and_down()
        except PreheatError as error:
            self._fail(error)
        except OSError as error:
            self._fail(PreheatError(f"the agent of {self.plan.start_id} cannot go on: {error}"))
        finally:
            self.begun.cancel.set()
            await self.engine.end()
            Path(self.plan.launch.endpoint).unlink(missing_ok=True)
            self.events.add("ended", self.state, reason=self.reason)
            await self.events.close()
            if server is not None:
                server.close()
            Path(self.plan.agent_socket).unlink(missing_ok=True)
        return EngineError.exit_code if self.state is State.FAILED else 0

    def _listen_to_the_kernel(self) -> None:
        loop = asyncio.get_running_loop()
        orders: dict[int, Callable[[], None]] = {
            signal.SIGTERM: self.order_drain,
            signal.SIGINT: self.order_stop,
        }
        for number, order in orders.items():
            loop.add_signal_handler(number, order)
        for number in self.begun.orders:
            orders[number]()
        loop.add_signal_handler(signal.SIGCHLD, self.engine.reap)
        self.engine.reap()
        loop.add_reader(self.begun.wake_fd, self._hear)

    def _hear(self) -> None:
        os.eventfd_read(self.begun.wake_fd)
        self.engine.hear()
        self._news.set()

    async def _up_and_down(self) -> None:
        if await self._unless_told(self._come_up()):
            await self._first_of(self._drain, self._stop, self.engine.ended)
            if self.engine.ended.is_set():
                raise await self.engine.exit_error()
        if self._stop.is_set():
            self._apply(Event.STOP)
            return
        self._apply(Event.DRAIN)
        if self.state is State.DRAINING:
            await self._finish_what_is_in_flight()

    async def _finish_what_is_in_flight(self) -> None:
        begun_s = time.monotonic()
        in_time = await asking.drained(
            self.plan, lambda: self._stop.is_set() or self.engine.ended.is_set()
        )
        if self.engine.ended.is_set():
            raise await self.engine.exit_error()
        if self._stop.is_set():
            self._apply(Event.STOP)
            return
        self._apply(Event.DRAINED, in_time=in_time, waited_s=time.monotonic() - begun_s)

    async def _unless_told(self, coming_up: Coroutine[Any, Any, None]) -> bool:
        """Runs ``coming_up``; False when an order to drain or stop came first."""
        task = asyncio.ensure_future(coming_up)
        orders = [asyncio.ensure_future(e.wait()) for e in (self._drain, self._stop)]
        ended = asyncio.ensure_future(self.engine.ended.wait())
        try:
            await asyncio.wait([task, ended, *orders], return_when=asyncio.FIRST_COMPLETED)
            # Its end explains whatever else went wrong.
            if ended.done():
                raise await self.engine.exit_error()
            if task.done():
                task.result()
                return True
            return False
        finally:
            for waiting in (task, ended, *orders):
                waiting.cancel()
            await asyncio.gather(task, ended, *orders, return_exceptions=True)

    async def _come_up(self) -> None:
        if self._heat.is_set():
            self.engine.ensure_launched()
        await self._weights()
        if not self._heat.is_set():
            with self._recorder.phase("held"):
                await self._heat.wait()
        self.engine.ensure_launched()
        self._apply(Event.HEAT)
        try:
            async with asyncio.timeout(self.plan.warmup.deadline_s):
                await self._engine_up()
                await self._warm_up()
                await self._prove()
        except TimeoutError:
            raise EngineError(
                f"{self.plan.start_id} was not ready {self.plan.warmup.deadline_s:g} s after its "
                f"engine was launched: {self.missing()}",
                advice="raise warmup.deadline_s, or see `preheat status` and the engine's log",
            ) from None
        except OSError as error:
            # If it is ending, the end is heard of now, and `_unless_told` goes on with that.
            await asyncio.sleep(DYING_S)
            raise ProofError(
                f"the engine of {self.plan.start_id} runs, but broke a connection: {error}"
            ) from error

    # ── up ──

    async def _weights(self) -> None:
        """Waits until the weights are verified. Raises SourceError when they are not."""
        await self._until(lambda: self.begun.weights_done)
        sealed = self._sealed()
        self._recorder.add(
            "weights",
            sealed.read_start_s,
            sealed.hash_end_s,
            bytes=sealed.size_bytes,
            sha256=sealed.sha256,
        )
        self._recorder.add("weights.hash", sealed.hash_start_s, sealed.hash_end_s)
        self._recorder.add("weights.read", sealed.read_start_s, sealed.read_end_s, track="weights")
        self._apply(
            Event.WEIGHTS_VERIFIED,
            sha256=sealed.sha256,
            bytes_read=sealed.bytes_read,
            page_cache_share=sealed.page_cache_share,
        )

    def _sealed(self) -> SealedWeights:
        """The verified weights. Raises SourceError."""
        begun = self.begun
        if begun.sealed is not None:
            return begun.sealed
        if isinstance(begun.weights_error, SourceError):
            raise begun.weights_error
        why = begun.weights_error or "the thread that reads them died; see the agent's log"
        raise SourceError(f"the weights {self.plan.weights.path} could not be read: {why}")

    async def _engine_up(self) -> None:
        self.begun.tell_engine()
        begun_s = self.begun.told_s
        while not await asking.engine_is_up(self.plan):
            await self._next_news(POLL_S)
        self._recorder.add("engine", begun_s, time.monotonic())
        self._add_marks(begun_s)
        self._apply(Event.ENGINE_UP)

    def _add_marks(self, begun_s: float) -> None:
        """What the engine's process said of its own phases, ``{"NAME": [start, end]}``."""
        for mark in self.begun.marks:
            # Anything may be on that line: it is the output of a program.
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                for name, (start_s, end_s) in json.loads(mark).items():
                    if name == "imported":
                        self._recorder.add("engine.process", start_s, end_s, track="engine")
                    elif name == "serving" and start_s >= begun_s:
                        self._recorder.add("engine.load", start_s, end_s)

    async def _warm_up(self) -> None:
        with self._recorder.phase("warmup", prompts=len(self.plan.warmup.prompts)):
            for prompt in self.plan.warmup.prompts:
                answer = await asking.ask_engine(self.plan, prompt, self.plan.warmup.max_tokens)
                warmup.require_success(answer.status, answer.body)
        self._apply(Event.WARMED_UP)

    async def _prove(self) -> None:
        known = self.plan.warmup.known_answer
        with self._recorder.phase("proof"):
            with self._recorder.phase("proof.engine"):
                direct = _answer(await asking.ask_engine(self.plan, known.prompt, known.max_tokens))
                key = self._check(direct)
            with self._recorder.phase("proof.gateway"):
                through = _answer(
                    await asking.ask_through_gateway(
                        self.plan, known.prompt, known.max_tokens, self._was_refused
                    )
                )
                if (gap := warmup.difference(direct, through, known.tolerance)) is not None:
                    raise ProofError(f"the answer through the gateway is another one: {gap}")
        self._refused = ""
        # A disk that takes no more must not keep a proven replica from serving.
        unrecorded = ""
        try:
            answers.record(Path(self.plan.answers), key, direct)
        except OSError as error:
            unrecorded = str(error)
        self._apply(
            Event.PROVEN,
            phases=msgspec.to_builtins(self._recorder.phases),
            answer=[[step.text, step.value] for step in direct],
            **({"answer_not_recorded": unrecorded} if unrecorded else {}),
        )

    def _was_refused(self, why: str) -> None:
        self._refused = why

    def _check(self, got: warmup.Answer) -> str:
        """Against the spec and what the first proven start answered; returns that record's key."""
        known = self.plan.warmup.known_answer
        if (gap := warmup.disagrees_with_spec(known, got)) is not None:
            raise ProofError(f"{self.plan.start_id} failed its proof: {gap}")
        directory = Path(self.plan.answers)
        key = warmup.answer_key(self.plan.launch, self._sealed().sha256, answers.cpu_model(), known)
        before = answers.recorded(directory, key)
        if before is not None and (gap := warmup.difference(before, got, known.tolerance)):
            raise ProofError(
                f"{self.plan.start_id} failed its proof: it answers otherwise than before: {gap}",
                advice=f"if the change is wanted, rm {directory / key}.json",
            )
        return key

    # ── small parts ──

    def _apply(self, event: Event, **details: Any) -> None:
        """The only place where the state changes."""
        self.state = next_state(self.state, event)
        self.events.add(event, self.state, **details)

    def _fail(self, error: PreheatError) -> None:
        self.reason = error.what
        self._apply(_fault(error), reason=error.what, advice=error.advice)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that a thread of ``begun`` reports."""
        while not condition():
            await self._next_news(None)

    async def _next_news(self, timeout_s: float | None) -> None:
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()

    @staticmethod
    async def _first_of(*events: asyncio.Event) -> None:
        waiting = [asyncio.ensure_future(event.wait()) for event in events]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()


def _answer(response: Response) -> warmup.Answer:
    return warmup.answer_from(response.status, response.body)


def _fault(error: PreheatError) -> Event:
    """As what kind of event the lifecycle sees an error."""
    if isinstance(error, EngineExited):
        return Event.ENGINE_EXITED
    if isinstance(error, ProofError):
        return Event.PROOF_FAILED
    if isinstance(error, SourceError):
        return Event.WEIGHTS_BAD
    if isinstance(error, EngineError):
        return Event.DEADLINE
    return Event.AGENT_BROKEN
