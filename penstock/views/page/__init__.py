"""The pieces of the report: each makes one section of the page from the contents, as data for the template."""
