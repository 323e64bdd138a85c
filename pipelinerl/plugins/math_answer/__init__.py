"""The verifier `math_answer`: compare the final answer by its text, its exact value, or its mathematics."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import VerifierComponent

COMPONENT: Final = VerifierComponent(
    build="pipelinerl.plugins.math_answer.verifier:open_verifier",
    deterministic=True,
    check_problem="pipelinerl.plugins.math_answer.verifier:refuse_unreadable",
    reference_answer="pipelinerl.plugins.math_answer.verifier:boxed_reference",
    needs=("math_verify", "antlr4"),
    remedy="pip install -e '.[math]'",
)
