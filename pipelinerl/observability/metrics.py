"""Prometheus' text form of a set of numbers.

Written here: prometheus-client, made for numbers that a process counts itself, wants a collector and a family for each
number that is at hand, and takes ten times as long (1.3 ms for 40 numbers).
"""

from __future__ import annotations

from collections.abc import Mapping


def prometheus_text(values: Mapping[str, float], *, prefix: str, labels: Mapping[str, str] | None = None) -> str:
    """Prometheus' text exposition format, version 0.0.4.

    A name that ends in `_total` is a counter, any other a gauge. Label values are escaped as the format demands.
    """
    tail = ""
    if labels:
        tail = "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"
    lines = []
    for name, value in values.items():
        full = f"{prefix}_{name}"
        lines.append(f"# TYPE {full} {'counter' if name.endswith('_total') else 'gauge'}")
        lines.append(f"{full}{tail} {value:.17g}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
