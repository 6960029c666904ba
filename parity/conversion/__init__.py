"""State that crosses frameworks: routes from one to the other and back, and what must hold of them."""

from .routes import ROUTES, ConversionCase, Promise, run_route
from .section import Conversion

__all__ = ["ROUTES", "Conversion", "ConversionCase", "Promise", "run_route"]
