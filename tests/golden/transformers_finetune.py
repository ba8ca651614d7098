"""Fine-tunes Transformers' PyTorch models and writes their losses to transformers_finetune.json.

PyTorch is a tool of this one script, bertjax never needs it. Run it again only after a change of
finetune_data.py or parity_data.py; with the extra `parity` (pip install -e '.[parity]'), or in an
environment of its own with numpy, torch==2.13.0 and transformers==5.24.0:

    cd tests && python -m golden.transformers_finetune

It takes a minute on one CPU core, float32, no dropout: for every kind of head 100 steps of
torch.optim.AdamW, a new batch each. All of it is independent of bertjax.

One thing is not Transformers' default: pad_token_id is None. With an id torch leaves that row of
the word table without a gradient; in Google's code and in bertjax it has one where padding takes
part in the softmax, over the positions of a span.
"""

import pathlib

import numpy as np
import torch
import transformers
from golden import finetune_data, parity_data

OUTPUT = pathlib.Path(__file__).with_suffix('.json')
IGNORED = -100  # the label that PyTorch's cross entropy leaves out
CLASSES = {
    'classification': transformers.BertForSequenceClassification,
    'regression': transformers.BertForSequenceClassification,
    'multi_label': transformers.BertForSequenceClassification,
    'choice': transformers.BertForMultipleChoice,
    'tagging': transformers.BertForTokenClassification,
    'span': transformers.BertForQuestionAnswering,
}
PROBLEMS = {'classification': 'single_label_classification', 'regression': 'regression',
            'multi_label': 'multi_label_classification'}


def make_model(kind: str) -> torch.nn.Module:
  config = transformers.BertConfig(
      **finetune_data.CONFIG, pad_token_id=None, attn_implementation='eager',
      num_labels=finetune_data.KINDS[kind], problem_type=PROBLEMS.get(kind))
  model = CLASSES[kind](config)
  state = {name: torch.from_numpy(array) for name, array in finetune_data.weights(kind).items()}
  model.load_state_dict(state)  # strict: every parameter, and no other
  return model.train()


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
  settings = finetune_data.OPTIMIZER
  plain, decayed = [], []
  for name, parameter in model.named_parameters():
    (plain if name.endswith('bias') or 'LayerNorm' in name else decayed).append(parameter)
  return torch.optim.AdamW(
      [{'params': decayed, 'weight_decay': settings['weight_decay']},
       {'params': plain, 'weight_decay': 0.0}],
      lr=settings['learning_rate'], betas=(settings['b1'], settings['b2']), eps=settings['eps'])


def share_of_peak(step: int) -> float:
  """Google's create_optimizer: linear warm-up from 0; the decay counts from step 0 as well."""
  warmup, last = finetune_data.OPTIMIZER['warmup_steps'], finetune_data.OPTIMIZER['num_steps']
  return step / warmup if step < warmup else 1 - step / last


def inputs_of(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
  """The same batch as Transformers takes it."""
  arrays = {name: array for name, array in batch.items() if not name.endswith('weights')}
  if 'label_weights' in batch:
    arrays['labels'] = np.where(batch['label_weights'] > 0, batch['labels'], IGNORED)
  tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
  return {name: tensor if tensor.is_floating_point() else tensor.long()
          for name, tensor in tensors.items()}


def train(kind: str) -> dict[str, list[float]]:
  """The loss of each step, before its update, and the norm of the gradient before clipping."""
  model = make_model(kind)
  optimizer = make_optimizer(model)
  schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_peak)
  series = {'loss': [], 'grad_norm': []}
  for batch in finetune_data.batches(kind):
    loss = model(**inputs_of(batch)).loss
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(
        model.parameters(), finetune_data.OPTIMIZER['clip_norm'])
    optimizer.step()
    schedule.step()
    for name, value in (('loss', loss), ('grad_norm', norm)):
      series[name].append(float(f'{value.item():.9g}'))  # nine digits are all of a float32
  return series


def main():
  torch.set_num_threads(1)
  torch.use_deterministic_algorithms(True)
  result = {}
  for kind in finetune_data.KINDS:
    result[kind] = train(kind)
    losses, norms = np.array(result[kind]['loss']), np.array(result[kind]['grad_norm'])
    print(f'{kind}: loss {losses[:5].mean():.4f} -> {losses[-5:].mean():.4f}, '
          f'{(norms > finetune_data.OPTIMIZER["clip_norm"]).mean():.0%} of the steps clipped')
  parity_data.save(OUTPUT, pathlib.Path(__file__).name, (torch, transformers, np), finetune_data,
                   result)


if __name__ == '__main__':
  main()
