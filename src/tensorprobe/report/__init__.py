"""Renders a comparison: text, csv, workbook."""
