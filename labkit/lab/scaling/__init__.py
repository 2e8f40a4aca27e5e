"""What a way of synchronising costs as nodes and links change; the ladder from the native way to ours."""

from labkit.cluster.cost import PAYLOAD_SHARE, bound_s, sent_bytes, shape_text, slowest_mbit, wire_s
from labkit.lab.scaling._ladder import PARTS, Climb, Ladder, read_climb, record_climb
from labkit.lab.scaling._ladder_view import ladder, ladder_remarks, ladder_table
from labkit.lab.scaling._point import Point, memory_floor, run_point, sum_up, typical_s
from labkit.lab.scaling._study import (
    EXACT,
    STRATEGIES,
    Result,
    Study,
    bound_samples_per_s,
    efficiency,
    record,
    record_file,
)
from labkit.lab.scaling._view import efficiencies, node_costs, table, throughput

__all__ = [
    "EXACT",
    "PARTS",
    "PAYLOAD_SHARE",
    "STRATEGIES",
    "Climb",
    "Ladder",
    "Point",
    "Result",
    "Study",
    "bound_s",
    "bound_samples_per_s",
    "efficiencies",
    "efficiency",
    "ladder",
    "ladder_remarks",
    "ladder_table",
    "memory_floor",
    "node_costs",
    "read_climb",
    "record",
    "record_climb",
    "record_file",
    "run_point",
    "sent_bytes",
    "shape_text",
    "slowest_mbit",
    "sum_up",
    "table",
    "throughput",
    "typical_s",
    "wire_s",
]
