"""The HTTP application over one engine: routes, errors, health."""

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from hicache.engine import http_errors, metrics_page, openai_api, sglang_api
from hicache.engine.engine import Engine


def build_app(engine: Engine) -> FastAPI:
    """Return the application. The engine stays the caller's to close."""
    app = FastAPI(title="HiCache", docs_url=None, redoc_url=None)
    http_errors.install(app)
    app.include_router(openai_api.router(engine))
    app.include_router(sglang_api.router(engine))

    @app.get("/health")
    async def health() -> Response:
        if engine.is_alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "closing"}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(metrics_page.render(engine), media_type=metrics_page.CONTENT_TYPE)

    return app
