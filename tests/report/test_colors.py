"""Colors of one group can be told apart, also by eyes that lack one kind of cone."""

from __future__ import annotations

from itertools import combinations

import pytest

from stepscope.analysis.kernels.kernel_classes import KERNEL_CLASSES
from stepscope.analysis.time.phases import IDLE, UNATTRIBUTED
from stepscope.analysis.time.phases import PHASES as PHASE_NAMES
from stepscope.document.colors import CLASSES, OWNERS, PALETTE, PHASES

np = pytest.importorskip("numpy")

EYES = {
    "all cones": np.eye(3),
    # Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
    "no red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE, DARK = "#ffffff", "#1c1f24"
LEAST = 12.0


def lab(color: str, eyes: str):
    """Lightness and the two axes of color, as some eyes see it."""
    shares = np.array([int(color[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    x, y, z = (
        np.cbrt(value) if value > 0.008856 else 7.787 * value + 16 / 116
        for value in XYZ @ np.clip(EYES[eyes] @ linear, 0, 1) / np.array([0.95047, 1, 1.08883])
    )
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distance(one: str, other: str) -> float:
    """In Lab, to the eyes that see it least: 2.3 can just be seen."""
    return min(float(np.linalg.norm(lab(one, eyes) - lab(other, eyes))) for eyes in EYES)


@pytest.mark.parametrize("group", [PHASES, OWNERS, CLASSES, dict(enumerate(PALETTE))])
def test_no_two_of_a_group_look_alike(group):
    closest = min(((distance(group[a], group[b]), a, b) for a, b in combinations(group, 2)))
    assert closest[0] > LEAST, closest
    assert min(distance(color, page) for color in group.values() for page in (WHITE, DARK)) > LEAST


def test_every_phase_and_class_has_one():
    assert {*PHASE_NAMES, IDLE, UNATTRIBUTED} == set(PHASES)
    assert set(KERNEL_CLASSES) == set(CLASSES)
