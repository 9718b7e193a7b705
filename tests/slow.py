"""Lists the slow tests that `make test` leaves out.

Most are further cases of a claim that a quick test makes too; a few whole files have no quick replacement (elastic
jobs, searches by several workers, FSDP1, frameworks on several ranks). A pattern is matched against a test's id,
`stories/test_rescue.py::test_name[case]`; `*` matches anything. The comment above each group says what stays quick.
Healthy trainings are marked in their own list.
"""

from __future__ import annotations

import fnmatch
import re

SLOW = (
    # a NaN weight, a jumping rate, permuted rows; one of each kind of healthy run
    "stories/test_rescue.py::*[[]attention*",
    "stories/test_rescue.py::*[[]rate x 30*",
    "stories/test_rescue.py::test_a_guard_saves_the_run*[[]RNN*",
    "stories/test_rescue.py::test_a_guard_saves_the_run*1e30*",
    "stories/test_rescue.py::test_a_guard_saves_the_run*AdamW, clipped*",
    "stories/test_rescue.py::*30_times_too_high*-clipped*",
    "stories/test_rescue.py::*starts_unstable*",
    "stories/test_rescue.py::*lowered_repeatedly*",
    "stories/test_rescue.py::test_a_guard_saves_the_run*AdamW, unclipped*",
    "stories/test_rescue.py::*30_times_too_high*SGD*",
    "stories/test_rescue.py::test_clipping_alone*NaN*",
    "stories/test_rescue.py::*bit_identical*[[]rnn*",
    # seo with DDP, clip6d with FSDP2; one way of making workers
    "recipes/test_ranks.py::*[[]cod-*",
    "recipes/test_ranks.py::*[[]mmdit-*",
    "recipes/test_ranks.py::*[[]sft-*",
    "recipes/test_ranks.py::*[[]seo-fsdp*",
    "recipes/test_ranks.py::*[[]clip6d-ddp*",
    "recipes/test_ranks.py::*[[]persistent workers*",
    "recipes/test_ranks.py::*[[]new workers-own*",
    # subprocess, torchrun, a spawned process; DDP of the script's own in test_run_scripts
    "stories/test_run_processes.py::*[[]accelerate launch*",
    "stories/test_run_processes.py::*started_by_lightning*",
    # the commands, README, and the check that nothing else is installed
    "stories/test_bare_wheel.py::*an_extra_installs*",
    "stories/test_bare_wheel.py::*the_demo_survives*",
    # the optimizers with s: SGD and its relatives, Shampoo, SOAP, Sophia, schedule-free ones
    "tensor/test_any_optimizer.py::*[[][a-rt-z]*",
    # the plain loop, GAN, PPO, Lightning and transformers
    "stories/test_examples.py::*on_deepspeed*",
    "stories/test_examples.py::*trl_sft*",
    "stories/test_examples.py::*notebook*",
    # learning, a quiet guard
    "recipes/test_sft.py::*fp16_overflows_learns*",
    "recipes/test_sft.py::*prompts_that_fill*",
    # one recipe, one resumed search
    "recipes/test_tune.py::*study_of_other_settings*",
    "recipes/test_tune.py::*worker_that_was_killed*",
    "recipes/test_tune.py::*[[]mmdit*",
    "recipes/test_tune.py::*[[]cod*",
    "recipes/test_tune.py::*tuned_seo_trains*",
    # resumes on another number of ranks: test_sharded_checkpoints.py; searches: recipes/test_tune.py
    "distributed/test_elastic.py::*",
    "distributed/test_tune_workers.py::*",
    # DDP, and one rank that cannot replay
    "distributed/test_prove_ranks.py::*[[]fsdp*",
    "distributed/test_prove_ranks.py::*changes_its_weights*",
    "distributed/test_prove_ranks.py::*no_longer_has*",
    "distributed/test_prove_ranks.py::*as_few_batches*",
    # nothing before torch, transformers, an import that fails
    "stories/test_run_arrival.py::*[[]lightning*",
    "stories/test_run_arrival.py::*[[]datasets*",
    "stories/test_run_arrival.py::*[[]accelerate*",
    "stories/test_run_arrival.py::*[[]find_spec*",
    # a bad sample, the stable loss once
    "recipes/test_clip6d_training.py::*resume_from_any*",
    "recipes/test_clip6d_training.py::*stable_loss[[]0*",
    "recipes/test_clip6d_training.py::*version_of_the_loss_learns[[][12]*",
    "recipes/test_clip6d_training.py::*killed_by_sigkill*",
    "recipes/test_clip6d_training.py::*six_modalities*",
    # seo is killed and resumed, and learns; the Trainer behind all recipes is tested in tensor/test_trainer.py
    "recipes/test_cod_train.py::*kill_9*",
    "recipes/test_cod_train.py::*learns_more_than*",
    "recipes/test_mmdit_training.py::*goes_on_exactly*",
    "recipes/test_mmdit_training.py::*learns_more_than*",
    "recipes/test_sft.py::*killed_goes_on*",
    "recipes/test_sft.py::*masked_batches_among*",
    "recipes/test_new.py::*two_ranks*",
    "recipes/test_new.py::*its_own_tests*",
    # stages of ZeRO in test_deepspeed.py, FSDP2 in test_fsdp.py
    "distributed/test_deepspeed_frameworks.py::*",
    "distributed/test_fsdp1.py::*",
    # one of several points at which a training dies; one of several losses and workers
    "tensor/test_trainer.py::*killed_anywhere*[[][12]?]",
    "tensor/test_trainer.py::*stopped_by_a_signal*[[][12]?]",
    "tensor/test_losses.py::*compiles_as_one_graph[[][a-e]*",
    "tensor/test_checkpoint_failures.py::*[[]read-only*",
    "tensor/test_checkpoint_signals.py::*restart_continues[[]Ctrl-C*",
    "tensor/test_shutdown.py::*data_workers_saves[[]SIGTERM, own*",
    "tensor/test_checkpoint_resume.py::*worker_processes_are_resumed_too[[]13*",
    "stories/test_run_scripts.py::*spawned_by_the_script*",
    "distributed/test_replay_together.py::*[[]tensor-4*",
    "silent/test_program.py::*judged_alike[[]healthy*",
    # ranks of frameworks: test_run_scripts.py; preloading; one way to end a run, one signal, one search of the site
    "adapters/test_two_ranks.py::*",
    "distributed/test_ranks_helper.py::*in_these_tests_frozen*",
    "tensor/test_run_states.py::*[[]halt*",
    "tensor/test_run_states.py::*[[]signal*",
    "tensor/test_kernels.py::*more_tensors_than_are_folded*",
    "browser/test_browser_site.py::*[[]too many*",
    "browser/test_browser_site.py::*[[]exit code*",
    "browser/test_browser_site.py::*[[]notebook*",
    "browser/test_browser_site.py::*[[]DeepSpeed*",
    "browser/test_browser_site.py::*[[]disable*",
    "browser/test_browser_access.py::*[[]1400*",
    "browser/test_browser_access.py::*400-dark*",
    "distributed/test_fsdp.py::*[[]1d-3*",
    "distributed/test_fsdp.py::*[[]copies*",
    "distributed/test_deepspeed.py::*none[[]3-bf16*",
    "distributed/test_deepspeed.py::*none[[]2-bf16*",
    "stories/test_demo.py::*disabled_guard_is_not_a_success*",
)


def find_slow(places: list[str]) -> set[str]:
    """Return the slow ones of these test ids under tests/."""
    whole = re.compile("|".join(map(fnmatch.translate, SLOW)))
    return {place for place in places if whole.match(place)}


def find_unused(places: list[str]) -> list[str]:
    """Return the patterns that match no test: it was renamed or removed."""
    return [pattern for pattern in SLOW if not fnmatch.filter(places, pattern)]
