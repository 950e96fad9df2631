"""What one attention saw.

B sequences, S tokens of each, N heads, R latent rank, P content and E rope channels per head.
"""

from dataclasses import dataclass

from torch import Tensor

from quantmla.mla.attention import Inputs
from quantmla.mla.rope import RopeOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCapture:
    """One attention's reads over whole causal sequences, before any transform; on CPU.

    Large captures are mapped from files that live until the stream moves on to the next layer.
    """

    unit_latent_BSR: Tensor  # RMS-normalised, before kv_a_layernorm's weight
    k_rope_BSE: Tensor  # after rotation, interleaved pairs
    q_content_BSNP: Tensor  # before absorption
    q_rope_BSNE: Tensor  # after rotation, interleaved pairs
    softmax_scale: float
    rope_order: RopeOrder  # of the model's own cache, which is not the order above

    @property
    def num_tokens(self) -> int:
        return self.unit_latent_BSR.shape[0] * self.unit_latent_BSR.shape[1]

    def inputs(self, sequence: int, norm_R: Tensor) -> Inputs:
        """One sequence as the readable attention takes it, in norm's dtype and on its device.

        `norm_R` is kv_a_layernorm's weight with the family's factors, as in MlaWeights.
        """

        def moved(x: Tensor) -> Tensor:
            return x[sequence].to(device=norm_R.device, dtype=norm_R.dtype)

        return Inputs(
            q_content_SNP=moved(self.q_content_BSNP),
            q_rope_SNE=moved(self.q_rope_BSNE),
            latent_TR=moved(self.unit_latent_BSR) * norm_R,
            k_rope_TE=moved(self.k_rope_BSE),
        )
