"""What runs leave behind, made readable: tables, figures and one page."""
