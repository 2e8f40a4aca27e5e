"""What a large batch costs at equal epochs: SGD against LARS, with equal budgets for their learning rates."""

from labkit.lab.large_batch._result import METHODS, RULES, Result, Row, Score, Tuning
from labkit.lab.large_batch._study import Study
from labkit.lab.large_batch._verdict import record, record_file, verdict
from labkit.lab.large_batch._view import accuracy, accuracy_table, rates, rates_table

__all__ = [
    "METHODS",
    "RULES",
    "Result",
    "Row",
    "Score",
    "Study",
    "Tuning",
    "accuracy",
    "accuracy_table",
    "rates",
    "rates_table",
    "record",
    "record_file",
    "verdict",
]
