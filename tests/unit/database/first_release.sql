CREATE TABLE answers (
    principal VARCHAR(255) NOT NULL,
    "key" VARCHAR(255) NOT NULL,
    request_sha256 VARCHAR(64) NOT NULL,
    job TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    CONSTRAINT pk_answers PRIMARY KEY (principal, "key")
);
CREATE INDEX ix_answers_created_at ON answers (created_at);
CREATE TABLE hosts (
    host VARCHAR(63) NOT NULL,
    facts TEXT,
    seen_at BIGINT,
    problem TEXT,
    shared_dir TEXT,
    sweep TEXT,
    sweep_request TEXT,
    CONSTRAINT pk_hosts PRIMARY KEY (host)
);
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
    version BIGINT NOT NULL,
    wanted_world_size INTEGER,
    wanted_hosts TEXT NOT NULL,
    group_round BIGINT NOT NULL,
    master_port INTEGER NOT NULL,
    restore_from TEXT,
    pause_request BOOLEAN NOT NULL,
    checkpoint_requests BIGINT NOT NULL,
    checkpoint_requests_done BIGINT NOT NULL,
    exporter BIGINT,
    numeric_environment TEXT,
    faults TEXT NOT NULL,
    CONSTRAINT pk_jobs PRIMARY KEY (job_id),
    CONSTRAINT uq_jobs_uid UNIQUE (uid)
);
CREATE INDEX ix_jobs_created_at_job_id ON jobs (created_at, job_id);
CREATE INDEX ix_jobs_finished_at ON jobs (finished_at);
CREATE INDEX ix_jobs_status_created_at ON jobs (status, created_at);
CREATE TABLE leases (
    name VARCHAR(64) NOT NULL,
    held BOOLEAN NOT NULL,
    epoch BIGINT NOT NULL,
    beat BIGINT NOT NULL,
    owner VARCHAR(255) NOT NULL,
    process TEXT NOT NULL,
    address VARCHAR(255) NOT NULL,
    CONSTRAINT pk_leases PRIMARY KEY (name)
);
CREATE TABLE tokens (
    name VARCHAR(63) NOT NULL,
    token_id VARCHAR(12) NOT NULL,
    scope VARCHAR(32) NOT NULL,
    sha256 VARCHAR(64) NOT NULL,
    created_at BIGINT NOT NULL,
    created_by VARCHAR(255),
    expires_at BIGINT,
    revoked_at BIGINT,
    last_used_at BIGINT,
    CONSTRAINT pk_tokens PRIMARY KEY (token_id)
);
CREATE TABLE agents (
    job_id VARCHAR(63) NOT NULL,
    host VARCHAR(63) NOT NULL,
    agent_number BIGINT NOT NULL,
    state VARCHAR(32) NOT NULL,
    process TEXT,
    token_sha256 VARCHAR(64),
    CONSTRAINT pk_agents PRIMARY KEY (job_id, host),
    CONSTRAINT fk_agents_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
CREATE TABLE attempts (
    job_id VARCHAR(63) NOT NULL,
    rank INTEGER NOT NULL,
    attempt BIGINT NOT NULL,
    pid BIGINT,
    started_at BIGINT NOT NULL,
    ended_at BIGINT,
    exit_code INTEGER,
    exit_signal INTEGER,
    retry_class VARCHAR(32),
    reason TEXT,
    message TEXT,
    step_at_start BIGINT,
    step_at_end BIGINT,
    CONSTRAINT pk_attempts PRIMARY KEY (job_id, rank, attempt),
    CONSTRAINT fk_attempts_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
CREATE INDEX ix_attempts_job_id_started_at_rank_attempt ON attempts (job_id, started_at, rank, attempt);
CREATE TABLE commits (
    job_id VARCHAR(63) NOT NULL,
    step BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    generation BIGINT NOT NULL,
    digest VARCHAR(64) NOT NULL,
    saved_at BIGINT NOT NULL,
    consumed BIGINT NOT NULL,
    consumed_hash BIGINT NOT NULL,
    CONSTRAINT pk_commits PRIMARY KEY (job_id, step),
    CONSTRAINT fk_commits_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
CREATE TABLE departures (
    job_id VARCHAR(63) NOT NULL,
    worker_id BIGINT NOT NULL,
    CONSTRAINT pk_departures PRIMARY KEY (job_id, worker_id),
    CONSTRAINT fk_departures_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
CREATE TABLE epochs (
    job_id VARCHAR(63) NOT NULL,
    epoch BIGINT NOT NULL,
    samples BIGINT NOT NULL,
    hash_sum BIGINT NOT NULL,
    expected_samples BIGINT NOT NULL,
    expected_hash_sum BIGINT NOT NULL,
    CONSTRAINT pk_epochs PRIMARY KEY (job_id, epoch),
    CONSTRAINT fk_epochs_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
CREATE TABLE events (
    job_id VARCHAR(63) NOT NULL,
    at BIGINT NOT NULL,
    kind VARCHAR(64) NOT NULL,
    message TEXT NOT NULL,
    rank INTEGER,
    attempt BIGINT,
    actor VARCHAR(255),
    event_id {event_id},
    CONSTRAINT fk_events_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
CREATE INDEX ix_events_job_id_event_id ON events (job_id, event_id);
CREATE TABLE members (
    job_id VARCHAR(63) NOT NULL,
    worker_id BIGINT NOT NULL,
    rank INTEGER NOT NULL,
    attempt BIGINT NOT NULL,
    state VARCHAR(32) NOT NULL,
    node TEXT,
    gpu_count INTEGER NOT NULL,
    backend VARCHAR(32),
    transport VARCHAR(32),
    joined_at BIGINT NOT NULL,
    joined_step BIGINT,
    last_heartbeat_at BIGINT,
    CONSTRAINT pk_members PRIMARY KEY (job_id, worker_id),
    CONSTRAINT fk_members_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
CREATE TABLE series (
    job_id VARCHAR(63) NOT NULL,
    name VARCHAR(128) NOT NULL,
    first {number},
    least {number},
    greatest {number},
    last {number},
    count BIGINT NOT NULL,
    not_finite BIGINT NOT NULL,
    at BIGINT NOT NULL,
    since BIGINT NOT NULL,
    step BIGINT NOT NULL,
    CONSTRAINT pk_series PRIMARY KEY (job_id, at, name),
    CONSTRAINT fk_series_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
CREATE INDEX ix_series_job_id_name_at ON series (job_id, name, at);
CREATE TABLE workers (
    job_id VARCHAR(63) NOT NULL,
    rank INTEGER NOT NULL,
    host VARCHAR(63) NOT NULL,
    attempt BIGINT NOT NULL,
    state VARCHAR(32) NOT NULL,
    process TEXT,
    restarts BIGINT NOT NULL,
    failures BIGINT NOT NULL,
    finished BOOLEAN NOT NULL,
    in_service BOOLEAN NOT NULL,
    progress TEXT NOT NULL,
    throughput_steps_per_sec {number} NOT NULL,
    checkpoints_saved BIGINT NOT NULL,
    checkpoints_before BIGINT NOT NULL,
    last_heartbeat_at BIGINT,
    exit_code INTEGER,
    exit_signal INTEGER,
    endings TEXT NOT NULL,
    fruitless BIGINT NOT NULL,
    proven_step BIGINT NOT NULL,
    CONSTRAINT pk_workers PRIMARY KEY (job_id, rank),
    CONSTRAINT fk_workers_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id) ON DELETE CASCADE
);
