"""Trains Transformers' PyTorch BERT and writes its losses to transformers_losses.json beside this.

PyTorch is a tool of this one script, bertjax never needs it. Run it again only after a change of
parity_data.py, in an environment of its own, from the root of the repository:

    pip install numpy torch==2.13.0 transformers==5.24.0
    python tests/golden/transformers_losses.py

It takes seconds on one CPU core, float32, no dropout, and writes the same bytes each time on the
same machine. Two series of 50 steps start from the same weights: 'bias_correction' with
torch.optim.AdamW, 'google' with the rule of google-research/bert optimization.py written out here
(AdamWeightDecayOptimizer). All of it is independent of bertjax.
"""

import pathlib

import numpy as np
import parity_data
import torch
import transformers

OUTPUT = pathlib.Path(__file__).with_suffix('.json')
IGNORED = -100  # the label that PyTorch's cross entropy leaves out


class GoogleAdamW:
  """AdamWeightDecayOptimizer: m / (sqrt(v) + eps) without bias correction, then decay, then rate.

  Takes and reads `param_groups` as torch.optim does.
  """

  def __init__(self, groups, betas, eps):
    self.param_groups, self.betas, self.eps = groups, betas, eps
    self.moments = {p: (torch.zeros_like(p), torch.zeros_like(p))
                    for group in groups for p in group['params']}

  @torch.no_grad()
  def step(self):
    b1, b2 = self.betas
    for group in self.param_groups:
      for p in group['params']:
        m, v = self.moments[p]
        m.mul_(b1).add_(p.grad, alpha=1 - b1)
        v.mul_(b2).add_(p.grad.square(), alpha=1 - b2)
        update = m / (v.sqrt() + self.eps) + group['weight_decay'] * p
        p.sub_(group['lr'] * update)


def make_model() -> transformers.BertForPreTraining:
  config = transformers.BertConfig(
      **parity_data.CONFIG, pad_token_id=parity_data.PAD, attn_implementation='eager')
  model = transformers.BertForPreTraining(config)
  state = {name: torch.from_numpy(array) for name, array in parity_data.weights().items()}
  missing, unexpected = model.load_state_dict(state, strict=False)
  tied = {'cls.predictions.decoder.weight', 'cls.predictions.decoder.bias'}
  assert set(missing) == tied and not unexpected, (missing, unexpected)
  assert {name for name, _ in model.named_parameters()} == set(state), 'a parameter is not tied'
  return model.train()


def make_optimizer(kind: str, model: torch.nn.Module):
  settings = parity_data.OPTIMIZER
  plain, decayed = [], []
  for name, parameter in model.named_parameters():
    (plain if name.endswith('bias') or 'LayerNorm' in name else decayed).append(parameter)
  groups = [{'params': decayed, 'weight_decay': settings['weight_decay']},
            {'params': plain, 'weight_decay': 0.0}]
  rule = torch.optim.AdamW if kind == 'bias_correction' else GoogleAdamW
  return rule(groups, betas=(settings['b1'], settings['b2']), eps=settings['eps'])


def rate_of(step: int) -> float:
  """Google's create_optimizer: linear warm-up from 0; the decay counts from step 0 as well."""
  settings = parity_data.OPTIMIZER
  peak, warmup = settings['learning_rate'], settings['warmup_steps']
  return peak * (step / warmup if step < warmup else 1 - step / settings['num_steps'])


def inputs_of(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
  """The same batch as Transformers takes it: a label at every token, most of them ignored."""
  labels = np.full(batch['input_ids'].shape, IGNORED)
  rows, slots = np.nonzero(batch['masked_lm_weights'])
  labels[rows, batch['masked_lm_positions'][rows, slots]] = batch['masked_lm_ids'][rows, slots]
  arrays = {name: batch[name] for name in ('input_ids', 'token_type_ids', 'attention_mask')}
  arrays |= {'labels': labels, 'next_sentence_label': batch['next_sentence_labels']}
  return {name: torch.from_numpy(array).long() for name, array in arrays.items()}


def train(kind: str) -> dict[str, list[float]]:
  """The losses of each step, before its update, and the norm of the gradient before clipping."""
  model = make_model()
  optimizer = make_optimizer(kind, model)
  batches = [inputs_of(batch) for batch in parity_data.batches()]
  series = {'total': [], 'masked_lm': [], 'next_sentence': [], 'grad_norm': []}
  for step in range(parity_data.OPTIMIZER['num_steps']):
    inputs = batches[step % len(batches)]
    out = model(**inputs)
    masked_lm, next_sentence = (
        torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        for logits, labels in ((out.prediction_logits, inputs['labels']),
                               (out.seq_relationship_logits, inputs['next_sentence_label'])))
    model.zero_grad()
    out.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(
        model.parameters(), parity_data.OPTIMIZER['clip_norm'])
    for group in optimizer.param_groups:
      group['lr'] = rate_of(step)
    optimizer.step()
    values = out.loss, masked_lm, next_sentence, norm
    for name, value in zip(series, values, strict=True):
      series[name].append(float(f'{value.item():.9g}'))  # nine digits are all of a float32
  return series


def main():
  torch.set_num_threads(1)
  torch.use_deterministic_algorithms(True)
  result = {kind: train(kind) for kind in ('bias_correction', 'google')}
  parity_data.save(OUTPUT, pathlib.Path(__file__).name, (torch, transformers, np), parity_data,
                   result)
  for kind in ('bias_correction', 'google'):
    total = result[kind]['total']
    print(f'{kind}: total loss {total[0]:.4f} -> {total[-1]:.4f}')


if __name__ == '__main__':
  main()
