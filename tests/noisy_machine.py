"""Step times as a shared machine has them: bursts, single slow steps, and levels that wander together."""

import random


def noisy_factors(seed: int, num: int) -> list[float]:
    """Return factors on a step time; 1 is the fastest."""
    numbers = random.Random(seed)
    found, wander, burst, height = [], 0.0, 0, 0.0
    for _ in range(num):
        wander = 0.95 * wander + numbers.gauss(0, 0.008)
        if burst:
            burst -= 1
        elif numbers.random() < 0.002:
            burst, height = numbers.randint(5, 60), numbers.uniform(0.1, 1.0)
        slow = numbers.expovariate(2.0) if numbers.random() < 0.02 else 0.0
        found.append(1.0 + abs(numbers.gauss(0, 0.02)) + wander + slow + (height if burst else 0.0))
    return found
