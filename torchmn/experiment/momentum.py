"""Momentum: a number, or one that changes from epoch to epoch."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from torchmn.experiment.fields import Count, Share, problem


class Ramp(BaseModel):
    """A momentum that goes in a line from one value to another, between two epochs."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)

    first: Share = Field(alias="from")
    last: Share = Field(alias="to")
    start: int = Field(0, ge=0)
    end: Count

    @model_validator(mode="after")
    def _in_order(self) -> Ramp:
        if self.end < self.start:
            raise problem(f"ends at epoch {self.end}, before it starts at {self.start}")
        return self

    def at(self, epoch: int) -> float:
        done = min(max((epoch - self.start) / max(self.end - self.start, 1), 0.0), 1.0)
        return self.first + (self.last - self.first) * done


Momentum = Annotated[
    Annotated[Share, Tag("#number")] | Annotated[Ramp, Tag("#ramp")],
    Discriminator(lambda value: "#ramp" if isinstance(value, dict | Ramp) else "#number"),
]
