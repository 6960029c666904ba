"""State that is moved between frameworks: routes from one to the other and back, and their laws."""

from .routes import ROUTES, ConversionCase, Promise, run_route
from .section import Conversion

__all__ = ["ROUTES", "Conversion", "ConversionCase", "Promise", "run_route"]
