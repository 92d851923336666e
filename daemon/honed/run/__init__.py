"""Workers, fetches and checks as processes and as units: their start, their end, their adoption."""
