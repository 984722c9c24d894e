"""What lists leave out, for the rows of a case: `reference_tail` for all rows at once, without a correction.

Dims as in case.py, and: N blocks, B = TAIL_BLOCK positions of a block
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..plan import TAIL_BLOCK
from .lists import Lists


def with_tail(
    q_QRD: Tensor, keys_HJD: Tensor, values_HJD: Tensor, logits_QRJ: Tensor, lists: Lists, scale: float
) -> Tensor:
    """Attention [Q, R, D] over each list, and over the means of what it leaves out of every block.

    `logits_QRJ` are -inf where a row sees nothing.
    """
    num_heads, num_rows, num_keys = len(keys_HJD), q_QRD.shape[1], keys_HJD.shape[1]
    group = len(q_QRD) // num_heads
    listed_QRJ = lists.mask(logits_QRJ)
    # all query heads of a KV head have one list
    left_out_HRJ = ~listed_QRJ[::group] & logits_QRJ[::group].isfinite()
    pad = -num_keys % TAIL_BLOCK
    left_out_HRNB = F.pad(left_out_HRJ.float(), (0, pad)).unflatten(-1, (-1, TAIL_BLOCK))
    num_HRN = left_out_HRNB.sum(-1)
    means = []
    for pool_HJD in (keys_HJD, values_HJD):
        blocks_HNBD = F.pad(pool_HJD, (0, 0, 0, pad)).unflatten(1, (-1, TAIL_BLOCK))
        sums_HRND = torch.einsum("hrnb,hnbd->hrnd", left_out_HRNB, blocks_HNBD)
        means.append(sums_HRND / num_HRN.clamp_min(1)[..., None])
    q_HGRD = q_QRD.unflatten(0, (num_heads, group))
    tail_HGRN = torch.einsum("hgrd,hrnd->hgrn", q_HGRD, means[0]) * scale + num_HRN.log()[:, None]
    list_HGRJ = logits_QRJ.masked_fill(~listed_QRJ, -torch.inf).unflatten(0, (num_heads, group))
    weights = torch.cat((list_HGRJ, tail_HGRN), -1).softmax(-1)
    out_HGRD = torch.einsum("hgrj,hjd->hgrd", weights[..., :num_keys], values_HJD)
    out_HGRD = out_HGRD + torch.einsum("hgrn,hrnd->hgrd", weights[..., num_keys:], means[1])
    return out_HGRD.reshape(len(q_QRD), num_rows, -1)
