"""msprobe under its own names, for its scripts; what is behind them is in peers/msprobe."""
