"""Unlike devices: what a probe measures, what a plan makes of it, and whether training bears it out."""

from labkit.lab.heterogeneity._plan_view import diff_table, doubts, plan_figure, plan_lines, plan_table
from labkit.lab.heterogeneity._probe import Probe, WorkerProbe, probe, read_probe, run_probe, save_cluster
from labkit.lab.heterogeneity._probe_view import link_table, profile_table, profiles
from labkit.lab.heterogeneity._study import COMPARED, RUNS, Result, Study, record
from labkit.lab.heterogeneity._study_view import (
    accuracies,
    accuracy_points,
    accuracy_table,
    speeds,
    step_times,
    table,
)
from labkit.lab.heterogeneity._uplinks import LinkProbe, probe_links, uplink_curves, uplink_table
from labkit.lab.heterogeneity._what_if import what_if

__all__ = [
    "COMPARED",
    "RUNS",
    "LinkProbe",
    "Probe",
    "Result",
    "Study",
    "WorkerProbe",
    "accuracies",
    "accuracy_points",
    "accuracy_table",
    "diff_table",
    "doubts",
    "link_table",
    "plan_figure",
    "plan_lines",
    "plan_table",
    "probe",
    "probe_links",
    "profile_table",
    "profiles",
    "read_probe",
    "record",
    "run_probe",
    "save_cluster",
    "speeds",
    "step_times",
    "table",
    "uplink_curves",
    "uplink_table",
    "what_if",
]
