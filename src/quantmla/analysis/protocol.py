"""How much is measured, and with which quantiser; presets by name."""

from dataclasses import dataclass

from quantmla.quant.format import CacheFormat, paper_format


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """Amounts of every study. A *cell* is one draw of `sequences` windows from one text."""

    draws: int = 3  # cells of each text; windows of one text are disjoint
    sequences: int = 8  # of a cell
    length: int = 512  # tokens
    seed: int = 0
    batch_size: int = 8  # sequences that run through attention at once
    group_size: int = 64  # content channels that share a scale in the errors that are studied
    matched_nmse: float = 0.01  # of the cache, in the matched-error study
    local_nmse: float = 1e-3  # of the cache, in the gain study
    points: int = 1  # sequences of each cell that the studies of the derivative look at
    probes: int = 0  # Rademacher probes for the diagonal of H; 0: the diagonal itself
    repetitions: int = 8  # of each intervention, for each point
    resamples: int = 2000  # of a bootstrap
    confidence: float = 0.95

    def direction_format(self) -> CacheFormat:
        """Whose errors are studied: the published quantiser at 4 bits, nothing protected."""
        return paper_format("c4r4", group_size=self.group_size).unprotected()


PRESETS = {
    "default": Protocol(),
    # Tables 4 to 6 of the paper: 2 texts, 3 draws, 8 x 512 tokens, 256 probes, 32 repetitions
    "paper": Protocol(probes=256, repetitions=32),
    "quick": Protocol(draws=1, sequences=2, length=256, repetitions=4, resamples=500),
}
