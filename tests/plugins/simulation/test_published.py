"""Hardware tables from published specifications: each duration agrees with its formula; settings must fit in memory."""

import pytest

from pipelinerl.errors import RecipeError
from pipelinerl.plugins.simulation.published import published_hardware


def test_simulated_decode_step_of_a_small_batch_takes_the_time_to_read_the_weights_and_each_rows_cache():
    """At 0.6 · 3.35 TB/s, 7.61e9 bf16 parameters are read in 7.57 ms, a token's 57,344 bytes of KV cache in 28.5 ns."""
    engine = published_hardware("h100:7b").times(engine_devices=1, trainer_devices=1, rows=64, context=1000).engine
    assert engine.step_s == pytest.approx(7.572e-3, rel=1e-3)
    assert engine.row_s == pytest.approx(28.53e-6, rel=1e-3)
    assert engine.decode_s(64) == pytest.approx(9.398e-3, rel=1e-3)


def test_simulated_training_time_follows_from_the_published_hardware_utilisation():
    table = published_hardware("h100:7b")
    one, eight = (table.times(engine_devices=1, trainer_devices=n, rows=1, context=0).trainer for n in (1, 8))
    assert one.token_s == pytest.approx(6 * 7.61e9 / (0.4 * 989e12))
    assert one.token_s == pytest.approx(8 * eight.token_s)
    assert one.optimizer_step_s == pytest.approx(8 * eight.optimizer_step_s)


def test_attention_makes_each_token_of_a_long_answer_more_expensive_to_train():
    table = published_hardware("v5p:32b")
    short, long = (
        table.times(engine_devices=4, trainer_devices=1, rows=1, context=tokens).trainer.token_s for tokens in (0, 8192)
    )
    assert long / short == pytest.approx(1 + 2 * 64 * 5120 * 8192 / 32.5e9)


def test_decode_batch_whose_kv_cache_does_not_fit_in_engine_memory_is_rejected():
    table = published_hardware("h100:7b")
    most = table.rows_that_fit(engine_devices=1, context=8000)
    table.times(engine_devices=1, trainer_devices=1, rows=most, context=8000)
    with pytest.raises(RecipeError, match="lower engine"):
        table.times(engine_devices=1, trainer_devices=1, rows=most + 1, context=8000)
