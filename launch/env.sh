# shellcheck shell=bash
# Environment of a training process: `source launch/env.sh tpu`, `gpu` or `cpu`. Sourced, never run.
#
# What is already set wins, so any line can be overridden from outside. No flag here changes what is
# computed. They are the usual ones for models of this size; python -m bertjax.tools.bench tells on
# your machines whether one pays.

# Compiled programs outlive the process: a restart skips the minutes of compiling. JAX lets only
# process 0 write them: the other hosts of a pod skip nothing unless all read one gs:// folder
# (--cache of the launch scripts). Machines made anew, and pods of GKE, keep nothing on their disks.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/bertjax/xla}

# Lines of a log appear as they are written, so that the last one before a crash is there.
export PYTHONUNBUFFERED=1

case ${1:-} in
  tpu)
    flags=(
      # The all-gathers of fsdp run while the layer before computes, instead of in between:
      --xla_enable_async_all_gather=true
      # ... as one operation with the matrix multiplication that hides them,
      --xla_tpu_enable_async_collective_fusion=true
      # ... all-gathers as well as all-reduces,
      --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true
      # ... on the tensor core, which would wait for them.
      --xla_tpu_overlap_compute_collective_tc=true
      # Data parallelism: all-reduces of gradients start as soon as each gradient is known,
      --xla_tpu_enable_data_parallel_all_reduce_opt=true
      # ... also where their sizes differ (stacked kernels, biases, the word table).
      --xla_tpu_data_parallel_opt_different_sized_ops=true
    )
    export LIBTPU_INIT_ARGS=${LIBTPU_INIT_ARGS:-${flags[*]}}
    ;;
  gpu)
    flags=(
      # Gathers, reductions and scatters of one layer run while the next one computes:
      --xla_gpu_enable_latency_hiding_scheduler=true
      # ... also across the iterations of the scan over the layers.
      --xla_gpu_enable_pipelined_all_gather=true
      --xla_gpu_enable_pipelined_all_reduce=true
      --xla_gpu_enable_pipelined_reduce_scatter=true
    )
    export XLA_FLAGS=${XLA_FLAGS:-${flags[*]}}
    # XLA's own cache, of the fastest kernels, would be in the same folder; XLA cannot open a gs://
    # one, and compilation would fail. What JAX keeps there needs no such search.
    if [[ $JAX_COMPILATION_CACHE_DIR == *://* ]]; then
      export JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES=${JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES:-none}
    fi
    # JAX takes 75 % of the memory by default: the rest would lie idle in a process that is alone.
    export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
    ;;
  cpu) ;;
  *)
    echo 'usage: source launch/env.sh tpu|gpu|cpu' >&2
    return 2
    ;;
esac
unset flags
