"""The settings of an update: those of the flags, or of a launcher that has none of our flags."""

from arlopti_testing.update_workers import flags

from arlopti_openrlhf.update.settings import Settings


def test_without_flags_they_are_the_defaults(tiny_model):
    assert Settings.of(flags(tiny_model, "--actor.update", "selective")) == Settings()


def test_all_flags_are_in_them(tiny_model):
    given = "--algo.ar.alpha 0.3 --algo.lopti.eta 0.5 --algo.lopti.scope minibatch --algo.token_method steer "
    given += "--algo.token_method_args steer.w_min=0.7 --algo.token_method_normalize --logger.probability_stats off "
    given += "--actor.gradient_checkpointing_level whole --actor.gradient_checkpointing_enable --actor.fill_memory "
    given += "--algo.mask_truncated"
    assert Settings.of(flags(tiny_model, *given.split())) == Settings(
        methods=("lopti", "ar", "steer"),
        arguments=("ar.alpha=0.3", "lopti.eta=0.5", "steer.w_min=0.7"),
        normalizes=True,
        scope="minibatch",
        statistics="off",
        checkpointing="whole",
        masks_truncated=True,
        fills_memory=True,
    )
