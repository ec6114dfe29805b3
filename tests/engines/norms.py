"""Norms as transformers computes them, with nothing cast down; set as a norm's ``forward``."""

import torch


def norm_in_full_precision(self, hidden):
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return self.weight * hidden * torch.rsqrt(variance + self.variance_epsilon)


def gemma_norm_in_full_precision(self, hidden):
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return (1.0 + self.weight) * hidden * torch.rsqrt(variance + self.eps)


def gemma_4_norm_in_full_precision(self, hidden):
    normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)
    return normed * self.weight if self.with_scale else normed
