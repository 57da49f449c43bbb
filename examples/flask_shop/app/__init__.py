"""The web application: `create_app` is what `flask run`, a WSGI server and the worker call."""

import os
from collections.abc import Mapping

from flask import Flask

from app.models import db
from app.views import shop


def create_app(settings: Mapping[str, object] | None = None) -> Flask:
    app = Flask(__name__)
    app.config["SHOP_NAME"] = "The Tea Shop"
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ.get("DATABASE_URL")
    app.config.update(settings or {})
    db.init_app(app)
    app.register_blueprint(shop)
    return app
