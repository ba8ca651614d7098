"""AdamW as BERT uses it: no bias correction, decoupled decay chosen by path, linear schedule; LAMB.

Source: google-research/bert optimization.py (AdamWeightDecayOptimizer, create_optimizer), except
that clipping is by the norm of the global gradient, after the all-reduce and after accumulation.
LAMB (You et al. 2020, algorithm 2) is as in MLCommons' lamb_optimizer_v1.py.

A step uses it like this; the rate that is logged is read from the count that the update reads:

    norm = optim.global_norm(grads)
    rate = optim.learning_rate(settings, state.opt_state)
    updates, opt_state = tx.update(grads, state.opt_state, state.params, grad_norm=norm)
    params = optax.apply_updates(state.params, updates)
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, BFloat16, Float, Float32, PyTree, UInt

from bertjax import dropout
from bertjax.config import ConfigError

_STACKED = 'encoder/layers/'  # parameters of the layers, stacked on a leading axis


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
  """All that shapes an update; stored with the checkpoint.

  Attributes:
    name: the rule, 'adamw' or 'lamb'. LAMB takes `bias_correction=True` as MLCommons does.
    learning_rate: the peak of the schedule.
    warmup_steps: steps of linear warm-up from 0.
    num_steps: length of the whole schedule, warm-up included.
    end_learning_rate: the rate at the end of the schedule and beyond it.
    power: of the polynomial decay; 1 is linear, 0 keeps the peak.
    weight_decay: decoupled: each update takes rate * weight_decay * parameter away.
    decay_exclude: regular expressions; a parameter whose path ('encoder/.../bias') one of them is
      found in does not decay.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the square root of the second moment.
    bias_correction: Adam's 1 / (1 - b^t) on both moments. BERT leaves it out, so that its first
      steps are about three times as long; fine-tuning on small sets may want it.
    moments_dtype: in which both moments are stored, 'float32' or 'bfloat16'; see `narrow_moments`.
    clip_norm: global gradients longer than this are scaled down to it; 0 never clips.
    trust_exempt: LAMB: whether what does not decay keeps the plain rate (MLCommons), instead of
      being adapted like all else (the paper, optax).
    layer_decay: the rate of each layer is that of the one above times this, that of the last layer
      times it the head's; the embeddings count as one more layer below (ELECTRA, section 3.1).
    freeze: 'none', 'embeddings', or 'encoder' (all but the head and the pooler).
    freeze_layers: the first so many layers are frozen, and the embeddings with them.
  """

  name: str = 'adamw'
  learning_rate: float = 1e-4
  warmup_steps: int = 10_000
  num_steps: int = 1_000_000
  end_learning_rate: float = 0.0
  power: float = 1.0
  weight_decay: float = 0.01
  # Every bias (of dense layers, of LayerNorms, of the MLM output) and every LayerNorm scale.
  decay_exclude: tuple[str, ...] = (r'(^|/)bias$', r'layer_norm/scale$')
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-6
  bias_correction: bool = False
  moments_dtype: str = 'float32'
  clip_norm: float = 1.0
  trust_exempt: bool = True
  layer_decay: float = 1.0
  freeze: str = 'none'
  freeze_layers: int = 0

  def __post_init__(self):
    if self.freeze not in ('none', 'embeddings', 'encoder'):
      raise ValueError(f"freeze is {self.freeze!r}; it must be 'none', 'embeddings' or 'encoder'")
    if self.freeze_layers < 0 or not 0 < self.layer_decay <= 1:
      raise ValueError(f'freeze_layers is {self.freeze_layers} and layer_decay {self.layer_decay}; '
                       'the one must not be negative, the other in (0, 1]')
    if self.name not in ('adamw', 'lamb'):
      raise ValueError(f"optimizer name is {self.name!r}; it must be 'adamw' or 'lamb'")
    if self.moments_dtype not in ('float32', 'bfloat16'):
      raise ValueError(
          f"moments_dtype is {self.moments_dtype!r}; it must be 'float32' or 'bfloat16'")
    if self.num_steps < 1:
      raise ValueError(f'num_steps of the schedule is {self.num_steps}; it must be at least 1')
    if not 0 <= self.warmup_steps <= self.num_steps:
      raise ValueError(
          f'warmup_steps is {self.warmup_steps}; it must lie between 0 and the '
          f'{self.num_steps} num_steps of the schedule'
      )
    for name in ('learning_rate', 'end_learning_rate', 'power', 'weight_decay', 'clip_norm'):
      if not 0 <= getattr(self, name) < float('inf'):
        raise ValueError(f'{name} is {getattr(self, name)}; it must be finite and not negative')
    for name in ('b1', 'b2'):
      if not 0 <= getattr(self, name) < 1:
        raise ValueError(f'{name} is {getattr(self, name)}; it must be in [0, 1)')
    if not self.eps > 0:
      raise ValueError(f'eps is {self.eps}; it must be positive')


def schedule(settings: OptimizerSettings) -> optax.Schedule:
  """The rate as a function of the updates already made.

  Warm-up is peak * step / warmup_steps from step 0, so the first update of a warm-up does nothing.
  The decay counts from step 0 as well, as in Google's create_optimizer: the rate drops by
  peak * warmup_steps / num_steps where the warm-up ends.
  """
  peak, end = settings.learning_rate, settings.end_learning_rate

  def rate(count):
    # Steps left are counted in integers: 1 - step / num_steps would lose its digits near the end.
    left = jnp.asarray(jnp.maximum(settings.num_steps - count, 0), float) / settings.num_steps
    decayed = end + (peak - end) * left**settings.power
    if settings.warmup_steps == 0:
      return decayed
    warm = peak * (jnp.asarray(count, float) / settings.warmup_steps)
    return jnp.where(count < settings.warmup_steps, warm, decayed)

  return rate


def make(
    settings: OptimizerSettings, abstract_params: PyTree
) -> optax.GradientTransformationExtraArgs:
  """The transformation gradients -> updates.

  Its `update` takes the keyword `grad_norm`, so that a step that logs the norm computes it once.
  Its state is a plain pytree whose moments have the structure of the parameters, so their paths
  end in the parameters' paths. The state has the same structure for every settings, and but for
  `moments_dtype` the same types.

  Args:
    settings: what to build.
    abstract_params: the parameter tree; only its structure and paths are read.

  Raises:
    ValueError: a pattern of decay_exclude matches no parameter.
  """
  if settings.bias_correction:
    adam = optax.scale_by_adam(b1=settings.b1, b2=settings.b2, eps=settings.eps)
  else:
    adam = scale_by_adam_uncorrected(b1=settings.b1, b2=settings.b2, eps=settings.eps)
  if settings.moments_dtype == 'bfloat16':
    adam = narrow_moments(adam)
  decays = decay_mask(abstract_params, settings.decay_exclude)
  decayed = optax.add_decayed_weights(settings.weight_decay, mask=decays)
  if settings.name == 'lamb':
    adapts = decays if settings.trust_exempt else jax.tree.map(lambda _: True, decays)
    decayed = _adapted(decayed, adapts)
  return optax.chain(
      _clip_transformation(settings.clip_norm),
      adam,
      _scaled(decayed, rate_multipliers(settings, abstract_params)),
      # Last, and `learning_rate` and `restart` rely on it.
      optax.scale_by_learning_rate(schedule(settings)),
  )


def learning_rate(settings: OptimizerSettings, opt_state: optax.OptState) -> Float[Array, '']:
  """The rate that the next update with this state applies: the one to log."""
  return schedule(settings)(opt_state[-1].count)


def restart(
    opt_state: optax.OptState, *, moments: bool = False, schedule: bool = False
) -> optax.OptState:
  """The state for a new phase: what is named starts from zero, the rest is carried over.

  Args:
    opt_state: the state of a transformation of `make`.
    moments: forget both moments, and the count that bias correction reads.
    schedule: begin the schedule again, with its warm-up.
  """
  *inner, rate_state = opt_state
  if moments:
    inner = jax.tree.map(jnp.zeros_like, inner)
  if schedule:
    rate_state = jax.tree.map(jnp.zeros_like, rate_state)
  return (*inner, rate_state)


def global_norm(grads: PyTree[Float[Array, '...']]) -> Float[Array, '']:
  """The Euclidean length of all gradients taken as one vector."""
  return jnp.asarray(optax.tree.norm(grads))


def clip(
    grads: PyTree[Float[Array, '...']], norm: Float[Array, ''], max_norm: float
) -> PyTree[Float[Array, '...']]:
  """Scales `grads`, whose length is `norm`, down to `max_norm` where they are longer.

  Shorter ones are returned bit for bit. A `norm` that is not finite destroys the update (zeros or
  NaN); it is the caller's to notice, see alarms.py.
  """
  scale = jnp.where(norm > max_norm, max_norm / norm, 1)
  return jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)


def decay_mask(params: PyTree, exclude: tuple[str, ...]) -> PyTree[bool]:
  """True for the parameters that decay: those whose path none of the patterns is found in.

  Raises:
    ConfigError: a pattern that matches no parameter, which is how a list written for another
      framework's names silently lets the norm scales decay.
  """
  leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
  paths = [jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in leaves]
  for pattern in exclude:
    if not any(re.search(pattern, path) for path in paths):
      raise ConfigError(
          f'decay_exclude: the pattern {pattern!r} matches none of the {len(paths)} parameters, '
          f'which are named like {paths[0]!r}; mend the pattern or take it out'
      )
  decays = [not any(re.search(pattern, path) for pattern in exclude) for path in paths]
  return jax.tree.unflatten(treedef, decays)


def rate_multipliers(settings: OptimizerSettings, params: PyTree) -> PyTree:
  """What the learning rate of each parameter is multiplied with; 0 where it is frozen.

  Args:
    settings: layer_decay, freeze and freeze_layers.
    params: the parameter tree; only paths and shapes are read.

  Returns:
    A tree of floats, and of arrays [L, 1, ...] for the stacked layers.

  Raises:
    ValueError: more frozen layers than there are.
  """
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  paths = {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}
  num_layers = next((leaf.shape[0] for path, leaf in paths.items() if _STACKED in path), 0)
  if settings.freeze_layers > num_layers:
    raise ValueError(
        f'freeze_layers is {settings.freeze_layers}, but there are {num_layers} layers')
  below = np.arange(num_layers)
  of_layers = settings.layer_decay ** (num_layers - below).astype(float)
  of_layers *= (below >= settings.freeze_layers) & (settings.freeze != 'encoder')
  frozen = settings.freeze != 'none' or settings.freeze_layers > 0
  of_embeddings = 0.0 if frozen else settings.layer_decay ** (num_layers + 1)

  def one(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    if _STACKED in name:
      return of_layers.astype(np.float32).reshape(-1, *(1,) * (len(leaf.shape) - 1))
    return of_embeddings if 'embeddings/' in name else 1.0

  return jax.tree_util.tree_map_with_path(one, params)


def hold(settings: OptimizerSettings, params: PyTree) -> PyTree:
  """The parameters, with no gradient where they are frozen; what is below them costs nothing."""
  if settings.freeze == 'none' and settings.freeze_layers == 0:
    return params

  def one(param, multiplier):
    if np.all(multiplier == 0):
      return jax.lax.stop_gradient(param)
    if np.all(multiplier != 0):
      return param
    return jnp.where(multiplier == 0, jax.lax.stop_gradient(param), param)

  return jax.tree.map(one, params, rate_multipliers(settings, params))


def _adapted(
    inner: optax.GradientTransformation, adapts: PyTree[bool]
) -> optax.GradientTransformation:
  """`inner`, its updates scaled to the length of their parameters where `adapts` says so (LAMB).

  The layers are stacked in one array; each of them is adapted by itself. The state stays that of
  `inner`.
  """

  def ratio(param, update, stacked):
    axes = tuple(range(1 if stacked else 0, param.ndim))
    length = lambda x: jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True))
    of_param, of_update = length(param), length(update)
    both = (of_param > 0) & (of_update > 0)
    return jnp.where(both, of_param / jnp.where(both, of_update, 1), 1)

  def update(grads, state, params=None):
    updates, state = inner.update(grads, state, params)

    def one(path, update, param, adapt):
      name = jax.tree_util.keystr(path, simple=True, separator='/')
      return update * ratio(param, update, _STACKED in name) if adapt else update

    return jax.tree_util.tree_map_with_path(one, updates, params, adapts), state

  return optax.GradientTransformation(inner.init, update)


def _scaled(
    inner: optax.GradientTransformation, multipliers: PyTree
) -> optax.GradientTransformation:
  """`inner`, its updates multiplied; the state stays that of `inner`."""

  def update(grads, state, params=None):
    updates, state = inner.update(grads, state, params)
    return jax.tree.map(
        lambda u, m: u if np.all(m == 1) else u * m, updates, multipliers), state

  return optax.GradientTransformation(inner.init, update)


def scale_by_adam_uncorrected(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
  """Adam without bias correction, m / (sqrt(v) + eps): the switch that optax's own lacks.

  The state is that of optax.scale_by_adam, so the switch never changes what a checkpoint holds.
  """

  def update(grads, state, params=None):
    del params
    mu = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, grads, state.mu)
    nu = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * jnp.square(g), grads, state.nu)
    updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu)
    count = optax.safe_increment(state.count)
    return updates, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

  return optax.GradientTransformation(optax.scale_by_adam().init, update)


def narrow_moments(adam: optax.GradientTransformation) -> optax.GradientTransformation:
  """Adam whose moments are stored in bfloat16 and computed with in float32.

  A step of Adam changes the second moment by about 1 - b2 = 0.1 % of itself, and bfloat16 knows no
  change below 0.2 %: rounded to the nearest, it would rise with large gradients and never decay
  again. (That is why optax narrows the first moment alone, and why those who narrow both take b2 =
  0.95.) So it is rounded up or down by chance, right on average: it then wanders around its
  true value by some per cent, and its square root by half of that. The first moment changes by
  1 - b1 = 10 % and is rounded to the nearest.

  The chance is a hash of step, parameter and position: the same on any mesh and after a resume.
  """

  def narrow(state):
    leaves, structure = jax.tree.flatten(state.nu)
    keys = [dropout.fold(dropout.mix(state.count.astype(jnp.uint32)), number)
            for number in range(len(leaves))]
    nu = [round_by_chance(leaf, key) for leaf, key in zip(leaves, keys, strict=True)]
    mu = jax.tree.map(lambda m: m.astype(jnp.bfloat16), state.mu)
    return state._replace(mu=mu, nu=jax.tree.unflatten(structure, nu))

  def update(grads, state, params=None):
    wide = jax.tree.map(lambda moment: moment.astype(jnp.float32), (state.mu, state.nu))
    updates, state = adam.update(grads, state._replace(mu=wide[0], nu=wide[1]), params)
    return updates, narrow(state)

  return optax.GradientTransformation(lambda params: narrow(adam.init(params)), update)


def round_by_chance(
    x: Float32[Array, '*shape'], key: UInt[Array, '']
) -> BFloat16[Array, '*shape']:
  """One of the two neighbours in bfloat16, the nearer one more often: `x` on average.

  Args:
    x: what is rounded; its neighbours differ in the upper 16 of the 32 bits.
    key: a word from which the chance follows.
  """
  position = jnp.zeros(x.shape, jnp.uint32)
  for axis in range(x.ndim):  # one iota an axis: a reshaped one would not be computed in shares
    stride = jnp.uint32(math.prod(x.shape[axis + 1:]))
    position += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
  noise = dropout.mix(key ^ dropout.mix(position)) & jnp.uint32(0xFFFF)
  bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) & jnp.uint32(0xFFFF0000)
  return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)


def _clip_transformation(max_norm: float) -> optax.GradientTransformationExtraArgs:
  """`clip` with the norm that the caller has already computed."""

  def update(grads, state, params=None, *, grad_norm=None, **extra):
    del params, extra
    if max_norm == 0:
      return grads, state
    norm = global_norm(grads) if grad_norm is None else grad_norm
    return clip(grads, norm, max_norm), state

  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
