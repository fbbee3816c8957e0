"""Two captures make a comparison: align, measure, judge, blame."""
