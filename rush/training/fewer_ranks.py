"""A recipe for fewer ranks than it was written for, with the same samples in every step.

Data ranks (ddp, fsdp) have other samples of the same step (`batch.total_tokens`), so their number may fall: each then runs
more micro batches. tp, cp and pp stay unchanged. The fsdp size stays where it still divides the data ranks, so that a rank
needs no more memory; else all of them go to fsdp, and a rank needs more.
"""

from __future__ import annotations

from rush.errors import RecipeError
from rush.recipe import Recipe


def fixed_step(recipe: Recipe) -> Recipe:
    """The recipe with an explicit batch.total_tokens, which stays on fewer ranks."""
    return recipe.model_copy(
        update={"batch": recipe.batch.model_copy(update={"total_tokens": recipe.step_tokens})}
    )


def shrunk(recipe: Recipe, world: int) -> Recipe:
    """The same training on `world` ranks, or a RecipeError with the numbers of ranks that are possible."""
    recipe = fixed_step(recipe)
    if recipe.world == world:
        return recipe
    fitted = _fit(recipe, world)
    if fitted is None:
        possible = ", ".join(str(n) for n in range(1, recipe.world + 1) if _fit(recipe, n) is not None)
        raise RecipeError(
            f"the layout takes {recipe.world} ranks and {world} are there, over which a step of {recipe.step_tokens:,} tokens "
            f"cannot be divided (batch.micro {recipe.batch.micro} × batch.sequence {recipe.batch.sequence} per rank, "
            f"layout.tp × pp × cp = {_model_parallel(recipe)}); numbers of ranks that are possible: {possible}."
        )
    return fitted


def fewer_ranks(recipe: Recipe, world: int, smallest: int) -> int | None:
    """The next smaller number of ranks that the recipe can run on."""
    possible = (n for n in range(world - 1, smallest - 1, -1) if _fit(fixed_step(recipe), n) is not None)
    return next(possible, None)


def changes(before: Recipe, after: Recipe) -> str:
    """The change of the layout, in one line."""
    sizes = after.layout.model_dump()
    parts = [
        f"layout.{axis} {size} → {sizes[axis]}"
        for axis, size in before.layout.model_dump().items()
        if size != sizes[axis]
    ]
    more = "more" if after.auto else f"{after.accumulation} micro batches instead of {before.accumulation}"
    return f"{after.world} ranks instead of {before.world}: {', '.join(parts)}; the samples of a step stay, each rank runs {more}."


def _model_parallel(recipe: Recipe) -> int:
    return recipe.layout.tp * recipe.layout.pp * recipe.layout.cp


def _fit(recipe: Recipe, world: int) -> Recipe | None:
    data, rest = divmod(world, _model_parallel(recipe))
    if rest or not data or world > recipe.world:
        return None
    fsdp = recipe.layout.fsdp
    sizes = {"ddp": data // fsdp, "fsdp": fsdp} if data % fsdp == 0 else {"ddp": 1, "fsdp": data}
    fitting = recipe.model_copy(update={"layout": recipe.layout.model_copy(update=sizes)})
    # An automatic micro batch can be as small as one row.
    per_pass = (1 if recipe.auto else recipe.micro) * recipe.batch.sequence * data
    return fitting if all(tokens % per_pass == 0 for tokens in recipe.step_sizes) else None
