"""The report: one HTML page with recorded measurements as charts, and the planner's choices for every row length."""
