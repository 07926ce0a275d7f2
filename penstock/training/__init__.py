"""COMPOSES capture x split x passes x runtime -> steps of a plan with the numbers of the unsplit model."""
