CREATE TABLE jobs (
    job_id VARCHAR(63) NOT NULL,
    uid VARCHAR(64) NOT NULL,
    spec TEXT NOT NULL,
    status VARCHAR(32) NOT NULL,
    reason TEXT,
    message TEXT,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    started_at BIGINT,
    finished_at BIGINT,
    exit_code INTEGER,
    stop_request VARCHAR(32),
    stop_grace_seconds {number},
    generation BIGINT NOT NULL,
    agent TEXT,
    agent_token_sha256 VARCHAR(64),
    version BIGINT NOT NULL,
    CONSTRAINT pk_jobs PRIMARY KEY (job_id),
    CONSTRAINT uq_jobs_uid UNIQUE (uid)
);
CREATE INDEX ix_jobs_created_at_job_id ON jobs (created_at, job_id);
CREATE INDEX ix_jobs_status_created_at ON jobs (status, created_at);
CREATE TABLE workers (
    job_id VARCHAR(63) NOT NULL,
    rank INTEGER NOT NULL,
    incarnation BIGINT NOT NULL,
    state VARCHAR(32) NOT NULL,
    process TEXT,
    restarts BIGINT NOT NULL,
    failures BIGINT NOT NULL,
    finished BOOLEAN NOT NULL,
    step BIGINT NOT NULL,
    total_steps BIGINT,
    epoch BIGINT NOT NULL,
    shard_idx BIGINT NOT NULL,
    line_idx BIGINT NOT NULL,
    loss {number},
    metrics TEXT NOT NULL,
    throughput_steps_per_sec {number} NOT NULL,
    checkpoints_saved BIGINT NOT NULL,
    last_checkpoint_step BIGINT,
    last_heartbeat_at BIGINT,
    exit_code INTEGER,
    exit_signal INTEGER,
    CONSTRAINT pk_workers PRIMARY KEY (job_id, rank),
    CONSTRAINT fk_workers_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
CREATE TABLE events (
    event_id {event_id},
    job_id VARCHAR(63) NOT NULL,
    at BIGINT NOT NULL,
    kind VARCHAR(64) NOT NULL,
    message TEXT NOT NULL,
    rank INTEGER,
    incarnation BIGINT,
    CONSTRAINT fk_events_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
CREATE INDEX ix_events_job_id_event_id ON events (job_id, event_id);
CREATE TABLE answers (
    principal VARCHAR(255) NOT NULL,
    "key" VARCHAR(255) NOT NULL,
    request_sha256 VARCHAR(64) NOT NULL,
    job TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    CONSTRAINT pk_answers PRIMARY KEY (principal, "key")
);
CREATE INDEX ix_answers_created_at ON answers (created_at);
CREATE TABLE leases (
    name VARCHAR(64) NOT NULL,
    epoch BIGINT NOT NULL,
    beat BIGINT NOT NULL,
    owner VARCHAR(255) NOT NULL,
    process TEXT NOT NULL,
    address VARCHAR(255) NOT NULL,
    held BOOLEAN NOT NULL,
    CONSTRAINT pk_leases PRIMARY KEY (name)
);
