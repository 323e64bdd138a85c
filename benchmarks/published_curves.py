"""Published comparisons against their simulation on the shipped hardware tables. No run, and no hardware.

    PipelineRL   arXiv:2509.19128, 7B on 128 H100s: in flight against conventional RL with G = 32 (§5, figure 5c),
                 and the authors' own model of both at equal lag (appendix A.4, figure 9)
    RLAX         arXiv:2512.06392, 32B: inference on v5p-128 to v5p-1024 with a v5p-512 trainer (§7.1, figure 3a),
                 and k = 16 against k = 32 (§7.2, figure 4)

Settings that the papers state are theirs. The others are assumptions, stated here once and the same for every arm:
lengths, prompts, group sizes, and RLAX's batch. The last table varies them; docs/understand/simulation.md discusses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.measure import Row, print_table, write_record
from inference_contract.weights import OnUpdate
from pipelinerl.simulation.hardware import TrainerTimes
from pipelinerl.simulation.prediction import Prediction
from pipelinerl.simulation.published import PublishedHardware, mean_context, published_hardware
from pipelinerl.simulation.setting import HeavyTailedLengths, LengthLaw, ObservedLengths, SimulatedSetting
from pipelinerl.simulation.simulator import simulate
from pipelinerl.staleness import StalenessBounds

#: Largest deviation from a published figure that counts as reproducing it.
TOLERANCE: Final = 0.25

# --- PipelineRL, §5: batch, rows and GPUs are published ---------------------------------------------------------------

_BATCH, _ROWS, _GPUS, _GENERATE = 1024, 64, 128, 48
_MOST_TOKENS: Final = 8192  # the authors' post on the 7B run, and their default configuration
#: §5 reports lags of more than 50,000 rollouts, and A.3 puts the largest at rows · GPUs · longest ÷ mean length.
_MEAN_TOKENS: Final = _ROWS * _GENERATE * _MOST_TOKENS / 50_000
_PROMPT, _GROUP = 150, 8  # assumed; and the default of the authors' configuration
#: Appendix A.4: B = 128, 44 of 128 GPUs generate with 192 rows each, the lag is 133 steps, lengths are uniform.
_A4_BATCH, _A4_GENERATE, _A4_ROWS, _A4_LAG = 128, 44, 192, 133
#: Its r_train is 26.02 tokens per flash on 128 GPUs; a flash is a forward pass of one token at peak, training takes 3.
_A4_UTILISATION: Final = 3 * 26.02 / 128

# --- RLAX, §7: clusters, (j, k) and the context of 16k tokens are published -------------------------------------------

_CLUSTERS: Final = (128, 256, 512, 1024)  # in cores, two for each chip (Google Cloud's naming)
_TRAINER_CHIPS: Final = 256  # v5p-512
_ENGINE_CHIPS: Final = 4  # assumed: one host
_RLAX_BATCH, _RLAX_GROUP, _RLAX_PROMPT, _RLAX_MEDIAN = 1024, 16, 500, 8000.0  # assumed
_CONTEXT: Final = 16_384
#: §5.1: the trainer recomputes all activations and the old log-probabilities, two forward passes more than 3 of each.
_RECOMPUTED: Final = 5 / 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """A published figure and its simulation."""

    name: str
    source: str
    published: float
    simulated: float

    @property
    def deviation(self) -> float:
        """Return simulated ÷ published − 1."""
        return self.simulated / self.published - 1

    @property
    def row(self) -> Row:
        """Return the line of the table."""
        return Row(
            f"{self.name} ({self.source})",
            f"{self.simulated:.3g} ({self.deviation:+.0%})",
            f"{self.published:g} ± {TOLERANCE:.0%}",
            abs(self.deviation) <= TOLERANCE,
        )


def heavy_tailed(mean: float, sigma: float, most: int) -> HeavyTailedLengths:
    """Return log-normal lengths with this mean before truncation."""
    return HeavyTailedLengths(mean * math.exp(-(sigma**2) / 2), sigma, most)


def conventional(lengths: LengthLaw, *, steps: int, table: PublishedHardware, batches: int = 32) -> Prediction:
    """Simulate conventional RL: all GPUs generate `batches` batches, then all train on them."""
    times = table.times(engine_devices=1, trainer_devices=_GPUS, rows=_ROWS, context=mean_context(lengths, _PROMPT))
    return simulate(
        SimulatedSetting(
            steps=steps,
            engines=_GPUS,
            slots=_ROWS,
            bounds=StalenessBounds(1, 1),
            on_update=OnUpdate.DRAIN,
            rollouts_per_step=_BATCH * batches,
            mini_batches=batches,
            group_size=_GROUP,
            lengths=lengths,
            prompt_tokens=_PROMPT,
            groups_in_flight=_BATCH * batches,
            max_groups=_BATCH * batches,
        ),
        times,
    )


def in_flight(lengths: LengthLaw, *, steps: int, table: PublishedHardware, filled: int = 4) -> Prediction:
    """Simulate in-flight updates: 48 GPUs generate while 80 train.

    `filled` is the number of rollouts in flight per row. Here a group keeps its place until its longest answer ends, so
    four keep the rows full, as the paper's algorithm 2 does by replacing each sequence that ends.
    """
    times = table.times(
        engine_devices=1, trainer_devices=_GPUS - _GENERATE, rows=_ROWS, context=mean_context(lengths, _PROMPT)
    )
    return simulate(
        SimulatedSetting(
            steps=steps,
            engines=_GENERATE,
            slots=_ROWS,
            bounds=StalenessBounds(1, math.inf),
            on_update=OnUpdate.CONTINUE,
            rollouts_per_step=_BATCH,
            group_size=_GROUP,
            lengths=lengths,
            prompt_tokens=_PROMPT,
            groups_in_flight=filled * _GENERATE * _ROWS // _GROUP,
        ),
        times,
    )


def equal_lag(*, steps: int) -> tuple[float, float]:
    """Simulate appendix A.4; return tokens per flash of conventional RL and in flight."""
    table = published_hardware("h100:7b")
    table = replace(table, accelerator=replace(table.accelerator, utilisation=_A4_UTILISATION))
    flash_s = 2 * table.size.parameters / table.accelerator.flops
    batches = _A4_LAG + 1
    base = SimulatedSetting(
        steps=2,
        engines=_GPUS,
        slots=_A4_ROWS,
        bounds=StalenessBounds(1, 1),
        on_update=OnUpdate.DRAIN,
        rollouts_per_step=_A4_BATCH * batches,
        mini_batches=batches,
        group_size=1,
        lengths=ObservedLengths(tuple(range(1, _MOST_TOKENS + 1))),
        groups_in_flight=_A4_BATCH * batches,
        max_groups=_A4_BATCH * batches,
    )
    piped = replace(
        base,
        steps=steps,
        engines=_A4_GENERATE,
        bounds=StalenessBounds(1, math.inf),
        on_update=OnUpdate.CONTINUE,
        rollouts_per_step=_A4_BATCH,
        mini_batches=1,
        groups_in_flight=2 * _A4_GENERATE * _A4_ROWS,
    )
    # the appendix leaves out attention: no context
    slow = simulate(base, table.times(engine_devices=1, trainer_devices=_GPUS, rows=_A4_ROWS, context=0))
    fast = simulate(
        piped, table.times(engine_devices=1, trainer_devices=_GPUS - _A4_GENERATE, rows=_A4_ROWS, context=0)
    )
    return slow.tokens_per_s * flash_s, fast.tokens_per_s * flash_s


def rlax(
    cores: int,
    *,
    steps: int,
    bounds: tuple[int, float] = (16, 32),
    median: float = _RLAX_MEDIAN,
    batch: int = _RLAX_BATCH,
    table: PublishedHardware | None = None,
    trains: bool = True,
    chips: int = _ENGINE_CHIPS,
) -> Prediction:
    """Simulate RLAX with an inference cluster of `cores`; without `trains`, training takes no time."""
    table = table or published_hardware("v5p:32b")
    lengths = HeavyTailedLengths(median, 0.5, _CONTEXT - _RLAX_PROMPT)
    context = mean_context(lengths, _RLAX_PROMPT)
    rows = table.rows_that_fit(engine_devices=chips, context=context) // _RLAX_GROUP * _RLAX_GROUP
    times = table.times(engine_devices=chips, trainer_devices=_TRAINER_CHIPS, rows=rows, context=context)
    token_s = times.trainer.token_s * _RECOMPUTED
    times = replace(times, trainer=replace(times.trainer, token_s=token_s) if trains else TrainerTimes(token_s=0.0))
    engines = cores // 2 // chips
    setting = SimulatedSetting(
        steps=steps,
        engines=engines,
        slots=rows,
        bounds=StalenessBounds(*bounds),
        on_update=OnUpdate.ABORT,  # §8: workers discard partial rollouts when they refresh their weights
        rollouts_per_step=batch,
        group_size=_RLAX_GROUP,
        lengths=lengths,
        prompt_tokens=_RLAX_PROMPT,
        groups_in_flight=2 * engines * rows // _RLAX_GROUP,
        attempts=steps,
    )
    return simulate(setting, times)


def run(quick: bool) -> None:
    """Simulate both papers; print published against simulated, and how much the assumptions matter."""
    lengths = heavy_tailed(_MEAN_TOKENS, 1.0, _MOST_TOKENS)
    h100 = published_hardware("h100:7b")
    pipe_steps, rlax_steps, a4_steps = (40, 80, 600) if quick else (100, 160, 1000)
    print_table(
        "Simulated arms of PipelineRL, 7B on 128 H100s (rollouts/s; published only as the ratio)",
        [
            *(
                Row(f"conventional, G = {g}", conventional(lengths, steps=2, table=h100, batches=g).rollouts_per_s)
                for g in (8, 16)
            ),
            Row("conventional, G = 32", (slow := conventional(lengths, steps=2, table=h100)).rollouts_per_s),
            Row("in flight, 48 + 80", (fast := in_flight(lengths, steps=pipe_steps, table=h100)).rollouts_per_s),
            Row(
                "in flight: largest lag, optimizer steps",
                max(fast.staleness),
                "49 (§5), from which the mean length is inferred",
            ),
        ],
    )
    points = {cores: rlax(cores, steps=rlax_steps) for cores in _CLUSTERS}
    print_table(
        "Simulated seconds per step of RLAX, 32B, trainer v5p-512 (the text publishes only the ratio of the ends)",
        [
            Row(f"inference on v5p-{cores}", f"{point.step_s:.3g} (trainer waits {point.trainer_wait:.0%})")
            for cores, point in points.items()
        ],
    )
    alone = [
        rlax(cores, steps=rlax_steps // 2, bounds=(10**6, math.inf), trains=False).tokens_per_s
        for cores in (_CLUSTERS[0], _CLUSTERS[-1])
    ]
    own_slow, own_fast = equal_lag(steps=a4_steps)
    comparisons = [
        Comparison("in flight ÷ conventional, G = 32", "§5, fig. 5c", 2.0, fast.rollouts_per_s / slow.rollouts_per_s),
        Comparison("A.4: conventional, tokens per flash", "A.4", 10.7, own_slow),
        Comparison("A.4: in flight, tokens per flash", "A.4", 16.9, own_fast),
        Comparison("A.4: in flight ÷ conventional", "A.4, fig. 9", 1.57, own_fast / own_slow),
        Comparison("RLAX inference alone, v5p-1024 ÷ v5p-128", "§7.1, fig. 3a", 8.0, alone[1] / alone[0]),
        Comparison("RLAX step, v5p-128 ÷ v5p-1024", "§7.1, fig. 3a", 3.6, points[128].step_s / points[1024].step_s),
        Comparison(
            "RLAX step, k = 16 ÷ k = 32",
            "§7.2, fig. 4",
            75 / 45,
            rlax(512, steps=rlax_steps, bounds=(16, 16)).step_s / points[512].step_s,
        ),
    ]
    print_table("Simulated against published", [comparison.row for comparison in comparisons])
    if quick:
        return
    varied = _varied(pipe_steps, rlax_steps)
    print_table("The two headline figures when an assumption changes", [comparison.row for comparison in varied])
    write_record(
        "published_curves",
        {
            part: {each.name: {"published": each.published, "simulated": each.simulated} for each in listed}
            for part, listed in (("comparisons", comparisons), ("varied", varied))
        },
    )


def _varied(pipe_steps: int, rlax_steps: int) -> list[Comparison]:
    """Return the headline figures with one assumption changed at a time."""
    h100, v5p = published_hardware("h100:7b"), published_hardware("v5p:32b")
    slow_h100 = replace(h100, accelerator=replace(h100.accelerator, utilisation=0.2))
    slow_v5p = replace(v5p, accelerator=replace(v5p.accelerator, utilisation=0.4))
    listed = []
    for name, mean, sigma, table, filled in (
        ("σ = 0.8", _MEAN_TOKENS, 0.8, h100, 4),
        ("σ = 1.2", _MEAN_TOKENS, 1.2, h100, 4),
        ("mean of 1,000 tokens", 1000.0, 1.0, h100, 4),
        ("mean of 2,000 tokens", 2000.0, 1.0, h100, 4),
        ("training at 0.2 of peak", _MEAN_TOKENS, 1.0, slow_h100, 4),
        ("groups for two rollouts per row", _MEAN_TOKENS, 1.0, h100, 2),
        ("groups for one rollout per row", _MEAN_TOKENS, 1.0, h100, 1),
    ):
        lengths = heavy_tailed(mean, sigma, _MOST_TOKENS)
        fast = in_flight(lengths, steps=pipe_steps, table=table, filled=filled)
        slow = conventional(lengths, steps=2, table=table)
        listed.append(Comparison(f"PipelineRL, {name}", "§5", 2.0, fast.rollouts_per_s / slow.rollouts_per_s))
    for name, median, batch, table, chips in (
        ("median of 4,000 tokens", 4000.0, _RLAX_BATCH, v5p, _ENGINE_CHIPS),
        ("median of 12,000 tokens", 12_000.0, _RLAX_BATCH, v5p, _ENGINE_CHIPS),
        ("batch of 512", _RLAX_MEDIAN, 512, v5p, _ENGINE_CHIPS),
        ("batch of 2,048", _RLAX_MEDIAN, 2048, v5p, _ENGINE_CHIPS),
        ("engines of 8 chips", _RLAX_MEDIAN, _RLAX_BATCH, v5p, 8),
        ("training at 0.4 of peak", _RLAX_MEDIAN, _RLAX_BATCH, slow_v5p, _ENGINE_CHIPS),
    ):
        first, last = (
            rlax(cores, steps=rlax_steps, median=median, batch=batch, table=table, chips=chips)
            for cores in (_CLUSTERS[0], _CLUSTERS[-1])
        )
        listed.append(Comparison(f"RLAX, {name}", "§7.1", 3.6, first.step_s / last.step_s))
    return listed
