"""What the documentation is made with: the site's hooks, generated parts, a picture, links."""
